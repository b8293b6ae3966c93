"""Entry point of `python -m verl_ext.data.prepare`."""

from __future__ import annotations

import sys

from verl_ext.data.prepare import prepare
from verl_ext.errors import exit_on_user_error


def main() -> None:
    """Prepare what the command line asks for; a mistake in it ends with exit code 2 and one sentence."""
    with exit_on_user_error():
        prepare(sys.argv[1:] or ["--help"])


if __name__ == "__main__":
    main()
