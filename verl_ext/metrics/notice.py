"""How this package tells the user about something that went wrong but does not stop the run."""

from __future__ import annotations

import sys


def warn(message: str) -> None:
    """Print one warning line to stderr.

    Args:
        message: what is wrong, and what happens instead, in one sentence.
    """
    print(f"warning: {message}", file=sys.stderr, flush=True)
