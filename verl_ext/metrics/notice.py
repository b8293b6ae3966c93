"""How this package tells the user about something that went wrong but does not stop the run."""

from __future__ import annotations

import sys

from verl_ext.tell import tell


def warn(message: str) -> None:
    """Print one warning line to stderr.

    Args:
        message: what is wrong, and what happens instead, in one sentence.
    """
    tell(f"warning: {message}", sys.stderr)
