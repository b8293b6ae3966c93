"""`python -m verl_ext.monitor`: shows all runs in a directory in a browser, or plots one run to files."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from verl_ext.cli import FAILURES, CommandParser, IntArg, add_command, add_commands, clean_exit
from verl_ext.commands import program
from verl_ext.console import print_line, print_summary
from verl_ext.errors import UserError, first_line_of
from verl_ext.processes import StopRequest

TOKEN = "VERL_EXT_MONITOR_TOKEN"
PACKAGES = {
    "nicegui": "nicegui==3.18.*",
    "orjson": "orjson",
    "numpy": "numpy",
    "scipy": "scipy",
    "yaml": "pyyaml",
    "omegaconf": "omegaconf",
    "matplotlib": "matplotlib",
}
"""Modules that the monitor imports, with their requirements for pip; it needs no other packages."""


def build_parser() -> CommandParser:
    """Return the parser, with the options of the server and the command `plot`."""
    parser = CommandParser(
        prog=program("monitor"),
        description="Show all runs in a directory in a browser, during and after training.",
        examples=[
            program("monitor"),
            f"{program('monitor')} --root /shared/checkpoints --port 6010",
            f"{TOKEN}=twelve-or-more-letters {program('monitor')} --host 0.0.0.0",
            f"{program('monitor')} plot checkpoints/rlvr_coding_model/sft_quickstart",
        ],
        exit_codes={"0": "ended by Ctrl-C or SIGTERM", "2": FAILURES["2"]},
    )
    _add_plot(parser)
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        default=Path("checkpoints"),
        help="directory that contains the runs, at any depth",
    )
    parser.add_argument("--port", type=IntArg(1, 65535), default=6007, help="TCP port")
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on; 127.0.0.1 is reachable from this machine only",
    )
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"access token; required if --host is not a loopback address (default: {TOKEN} from the environment)",
    )
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="the monitor's own SQLite file (default: in the user's cache)"
    )
    return parser


def _add_plot(parser: CommandParser) -> None:
    plot = add_command(
        add_commands(parser, required=False),
        "plot",
        "Write the charts of one run as PNG files and one HTML page.",
        examples=[f"{program('monitor')} plot checkpoints/rlvr_coding_model/sft_quickstart --output plots"],
    )
    plot.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="checkpoints/<project>/<experiment>")
    plot.add_argument("--output", type=Path, metavar="DIR", default=Path("plots"), help="directory to write to")
    plot.add_argument("--smoothing", type=float, default=0.6, metavar="X", help="from 0 (none) to below 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is stopped, or plot.

    Args:
        argv: arguments without the program's name; None uses the arguments of the process.

    Raises:
        SystemExit: with code 2 after bad input and, for `plot`, 75 after a stop; standard error explains it.
    """
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        require_packages()
        if arguments.command == "plot":
            plot(arguments)
        else:
            serve_runs(arguments)
    return 0


def plot(arguments: argparse.Namespace) -> None:
    """Write the charts of a run.

    Raises:
        UserError: the directory is not a run, the smoothing is out of range, or a file cannot be written.
    """
    if not 0 <= arguments.smoothing < 1:
        raise UserError(f"--smoothing is {arguments.smoothing}; it must be from 0 to below 1")
    from verl_ext.monitor.plot import PAGE_FILE, plot_run

    try:
        paths = plot_run(arguments.run_dir, arguments.output, arguments.smoothing)
    except OSError as error:
        raise UserError(f"{arguments.output} cannot be written ({error.strerror}); specify another --output") from error
    rows = {"page": arguments.output / PAGE_FILE, "charts": f"{len(paths)} PNG files in {arguments.output}"}
    print_summary(f"Plotted: {arguments.run_dir}", rows)


def serve_runs(arguments: argparse.Namespace) -> None:
    """Check the arguments and serve.

    Raises:
        UserError: the root is not a directory, the port is taken, or a token is missing.
    """
    from verl_ext.monitor.access import check_token
    from verl_ext.monitor.database import database_for
    from verl_ext.monitor.server import serve

    token = arguments.token or os.environ.get(TOKEN) or None
    if not arguments.root.is_dir():
        raise UserError(f"{arguments.root} is not a directory; set --root to the directory that contains the runs")
    check_token(arguments.host, token)
    check_port(arguments.host, arguments.port)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    address = f"http://{host}:{arguments.port}/"
    # a token from the environment is not printed, because the output may end up in a log
    shown = "..." if arguments.token is None else quote(arguments.token, safe="")
    query = "" if token is None else f"?token={shown}"
    print_line(f"Showing the runs in {arguments.root}/ at {address}{query} (press Ctrl-C to stop)")
    database = arguments.database or database_for(arguments.root)
    try:
        serve(arguments.root.resolve(), database, arguments.host, arguments.port, token)
    except StopRequest as stop:  # the server raises it after closing its connections
        stop.handled = True
        print_line(f"Ended by {stop}.")


def require_packages() -> None:
    """Refuse to start without the packages of the monitor.

    Raises:
        UserError: a package is missing.
    """
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"the monitor needs packages that are missing; run `pip install {' '.join(missing)}`")


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be used.

    Raises:
        UserError: the port is in use, or not allowed.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        raise UserError(
            f"port {port} of {host} cannot be used ({first_line_of(error)}); set another --port or --host"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
