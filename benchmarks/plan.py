"""`python -m verl_ext.plan` against what really happens: memory predicted and measured, setting by setting.

Each setting trains a random model of its own with this project's trainer, by torchrun, on CPUs: FSDP2, gloo, three
steps. Two figures of each rank's peak are compared with the plan's: `resident`, what the process holds of the machine's
memory above what it held before the model was made, and `tensors`, the bytes of live tensors by torch's allocator.
glibc is told to give freed tensors back at once, else the first would be what was ever held, not what is. The
prediction gets no number from the measurement but the data's share of learnt tokens.

Step times are told beside the plan's, too; a CPU's speed in the table of hardware is an assumption.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.plan_settings import SETTINGS, TARGET
from verl_ext.cli import clean_exit
from verl_ext.console import print_line, progress_bar

NAMES = f"default: all, which are {'; '.join(SETTINGS)}"


def table_of(settings: dict[str, dict[str, Any]]) -> str:
    """The figures as text."""
    head = (
        f"{'setting':<50}{'predicted':>11}{'resident':>10}{'error':>8}{'tensors':>10}{'error':>8}{'step':>8}{'plan':>8}"
    )
    rows = [
        f"{name:<50}{each['predicted_gib']:11.3f}{each['resident_gib']:10.3f}{each['resident_error']:8.1%}"
        f"{each['tensors_gib']:10.3f}{each['tensors_error']:8.1%}{each['step_s']:8.1f}{each['predicted_step_s']:8.1f}"
        for name, each in settings.items()
    ]
    return "\n".join([head, *rows])


@clean_exit()
def main() -> None:
    """Measure, print the figures, and put them into the file, beside those that it has."""
    parser = bench_parser("plan", __doc__, "", "--settings 'two ranks' 'two ranks, bf16' --output FILE.json")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=NAMES)
    arguments = parser.parse_args()
    from benchmarks.plan_runs import Bench, compare  # here, as torch takes seconds to import

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        for setting in progress_bar(arguments.settings, desc="measuring", unit="settings"):
            found[setting] = compare(bench, SETTINGS[setting])
            if arguments.output is not None:
                record(found, arguments.output)
    print_line(table_of(found))


def record(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Put figures into a file, beside those that it has of other settings."""
    former = json.loads(path.read_text())["settings"] if path.is_file() else {}
    settings = {**former, **found}
    ordered = {name: settings[name] for name in SETTINGS if name in settings}
    write_figures({"target": TARGET, "settings": ordered}, path)


if __name__ == "__main__":
    main()
