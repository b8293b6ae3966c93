"""`python -m verl_ext.monitor plot RUN_DIR`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.cli import Commands, add_command
from verl_ext.commands import program
from verl_ext.console import print_summary
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE

if TYPE_CHECKING:
    from verl_ext.monitor.view import RunView

PAGE_FILE = "charts.html"


def add_plot(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "plot",
        "Write the charts of one run as PNG files and one HTML page.",
        examples=[f"{program('monitor')} plot checkpoints/rlvr_coding_model/sft_quickstart --output plots"],
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="checkpoints/<project>/<experiment>")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("plots"), help="directory that the files go to"
    )
    parser.add_argument("--smoothing", type=float, default=0.6, metavar="X", help="from 0, none, to below 1")


def run(arguments: argparse.Namespace) -> None:
    """Write every chart as PNG, and one page with all of them.

    Raises:
        UserError: the directory is no run's, the smoothing is none, or a file cannot be written.
    """
    if not 0 <= arguments.smoothing < 1:
        raise UserError(f"--smoothing is {arguments.smoothing}; it must be from 0 to below 1")
    from verl_ext.monitor.plot.html import write_page
    from verl_ext.monitor.plot.png import write_charts

    with view_of(arguments.run_dir) as view:
        try:
            paths = write_charts(view, arguments.output, arguments.smoothing)
            write_page(view, arguments.output / PAGE_FILE, arguments.smoothing)
        except OSError as error:
            raise UserError(
                f"{arguments.output} cannot be written ({error.strerror}); give another --output"
            ) from error
    rows = {"page": arguments.output / PAGE_FILE, "charts": f"{len(paths)} PNG files in {arguments.output}"}
    print_summary(f"Plotted: {arguments.run_dir}", rows)


@contextmanager
def view_of(run_dir: Path) -> Iterator[RunView]:
    """One run, read into a database that is gone afterwards.

    Raises:
        UserError: it is no run that has begun.
    """
    for name in (RUN_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}, so it is no run that has begun; give a run directory")
    from verl_ext.monitor.store.database import open_database
    from verl_ext.monitor.store.ingest import Ingest
    from verl_ext.monitor.view import RunView

    root = run_dir.resolve().parent
    with tempfile.TemporaryDirectory(prefix="verl_ext_plot_") as directory:
        with closing(open_database(Path(directory) / "plot.sqlite")) as connection:
            run = Ingest(connection, root).take_one(run_dir.resolve())
            yield RunView(connection, run, root)
