"""Entry point of `python -m verl_ext.data.prepare`."""

from __future__ import annotations

import sys

from verl_ext.cli import clean_exit
from verl_ext.data.prepare import prepare


def main() -> None:
    """Run the command on the command line; bad input exits with code 2 and an error message."""
    with clean_exit():
        prepare(sys.argv[1:], is_typed=True)


if __name__ == "__main__":
    main()
