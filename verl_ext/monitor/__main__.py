"""`python -m verl_ext.monitor`: every run below a directory in a browser."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from verl_ext.cli import FAILURES, CommandParser, IntArg, add_commands, clean_exit
from verl_ext.commands import program
from verl_ext.console import print_line
from verl_ext.errors import UserError, first_line_of
from verl_ext.monitor.plot.command import add_plot, run
from verl_ext.monitor.store.database import database_for
from verl_ext.processes import StopRequest

TOKEN = "VERL_EXT_MONITOR_TOKEN"
PACKAGES = {
    "nicegui": "nicegui==3.18.*",
    "orjson": "orjson",
    "numpy": "numpy",
    "scipy": "scipy",
    "yaml": "pyyaml",
    "matplotlib": "matplotlib",
}
"""What the monitor imports, and what pip calls it."""


def build_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog=program("monitor"),
        description="Show every run below a directory in a browser: live while it trains, and afterwards.",
        examples=[
            program("monitor"),
            f"{program('monitor')} --root /shared/checkpoints --port 6010",
            f"{TOKEN}=twelve-or-more-letters {program('monitor')} --host 0.0.0.0",
            f"{program('monitor')} plot checkpoints/rlvr_coding_model/sft_quickstart",
        ],
        exit_codes={"0": "ended by Ctrl-C or SIGTERM", "2": FAILURES["2"]},
    )
    add_plot(add_commands(parser, required=False))
    parser.add_argument("--root", type=Path, metavar="DIR", default=Path("checkpoints"), help="where runs lie")
    parser.add_argument("--port", type=IntArg(1, 65535), default=6007, help="TCP port")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1 is this machine alone")
    parser.add_argument(
        "--token", metavar="WORD", help=f"word that visitors must bring; needed with another host (or set {TOKEN})"
    )
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="the monitor's own SQLite file (default: in the user's cache)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is asked to end, or plot.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Raises:
        SystemExit: with code 2 after bad input and 75 after a stop, each explained on standard error.
    """
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        require_packages()
        if arguments.command == "plot":
            run(arguments)
        else:
            serve_with(arguments)
    return 0


def serve_with(arguments: argparse.Namespace) -> None:
    """Check the arguments, and serve.

    Raises:
        UserError: the root is no directory, the port is taken, a token is missing, or a package is.
    """
    from verl_ext.monitor.access import require_token
    from verl_ext.monitor.server import serve

    token = arguments.token or os.environ.get(TOKEN) or None
    if not arguments.root.is_dir():
        raise UserError(f"{arguments.root} is not a directory; give --root, the directory below which runs lie")
    require_token(arguments.host, token)
    check_port(arguments.host, arguments.port)
    address = f"http://{arguments.host}:{arguments.port}/"
    # a token of the environment is not shown, where it may come to lie in a log
    shown = "..." if arguments.token is None else quote(arguments.token, safe="")
    asked = "" if token is None else f"?token={shown}"
    print_line(f"Training monitor of {arguments.root} on {address}{asked} (Ctrl-C ends it)")
    database = arguments.database or database_for(arguments.root)
    try:
        serve(arguments.root.resolve(), database, arguments.host, arguments.port, token)
    except StopRequest as stop:  # which the server passes on when it has closed its connections
        stop.handled = True
        print_line(f"Ended by {stop}.")


def require_packages() -> None:
    """Refuse to begin without the packages of the monitor, which runs on machines that have none of the others.

    Raises:
        UserError: one is missing.
    """
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"the monitor needs packages that are missing; run `pip install {' '.join(missing)}`")


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be had.

    Raises:
        UserError: it is taken, or not allowed.
    """
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise UserError(
            f"port {port} of {host} cannot be had ({first_line_of(error)}); give another --port or --host"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
