"""Where the product keeps what may be removed at any time, as it is made anew then."""

from __future__ import annotations

import os
from pathlib import Path


def users_cache() -> Path:
    """This product's folder in the user's cache directory, which `XDG_CACHE_HOME` names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_ext"
