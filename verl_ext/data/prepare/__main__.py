"""Entry point of `python -m verl_ext.data.prepare`."""

from __future__ import annotations

import sys

from verl_ext.cli import clean_exit
from verl_ext.data.prepare import prepare


def main() -> None:
    """Prepare what the command line asks for; a mistake in it ends with exit code 2 and one sentence."""
    with clean_exit():
        prepare(sys.argv[1:], is_typed=True)


if __name__ == "__main__":
    main()
