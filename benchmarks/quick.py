"""Short runs of some benchmarks, whose ratios are compared with the committed ones, to find what got slower.

Each number is a ratio of two measurements of the same run, so that machines of different speed can be compared. Ratios
that are worse than the committed ones by more than 15% are reported, but the command does not fail.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, run
from verl_ext.cli import CommandParser, clean_exit
from verl_ext.console import print_line
from verl_ext.data.prepare import prepare
from verl_ext.errors import UserError

TOLERANCE = 0.15
TIMEOUT_S = 150
Recorded = Mapping[str, Any]


@dataclass(frozen=True)
class RegressionCheck:
    """A ratio that is compared with the committed one.

    Attributes:
        what: the ratio in words.
        command: command of the short run without the interpreter; `{output}` is its JSON file, `{scratch}` a directory.
        results: name of the committed file.
        ratio: computes the ratio from either results.
        more_is_better: whether a higher ratio is better.
    """

    what: str
    command: Sequence[str]
    results: str
    ratio: Callable[[Recorded], float]
    more_is_better: bool = True


def without_trackers(parts: Recorded) -> float:
    """Seconds of a start without trackers, because a short run has none."""
    return parts["total_s"]["median"] - parts["trackers_s"]["median"]


CHECKS = {
    "sft": RegressionCheck(
        "tokens per second, ours over a bare loop",
        "-m benchmarks.sft --quick --rounds 1 --num-steps 3 --output {output}".split(),
        "sft_2cpu.json",
        lambda results: results["ours_over"]["bare, packed"],
    ),
    "checkpoint": RegressionCheck(
        "how long training waits for a save, verl's over ours",
        (
            "-m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.checkpoint --quick --repeats 2"
            " --directory {scratch}/saved --tokenizer {scratch}/quickstart/model --output {output}"
        ).split(),
        "checkpoint_2cpu_disk.json",
        lambda results: results["stall_of_verl_over_sync"],
    ),
    "monitor": RegressionCheck(
        "reading rows into the database, over parsing them",
        "-m benchmarks.monitor --rows 100000 --no-browser --output {output}".split(),
        "monitor_2cpu.json",
        lambda results: results["ingest_s"] / results["parse_s"],
        more_is_better=False,
    ),
    "start": RegressionCheck(
        "the first step without trackers, over the ranks' imports",
        (
            "-m benchmarks.start --repeats 1 --output {output} prepare=[] trainer.logger=[]"
            " data.train_files={scratch}/quickstart/train.parquet data.val_files={scratch}/quickstart/val.parquet"
            " model.partial_pretrain={scratch}/quickstart/model"
        ).split(),
        "start_2cpu.json",
        lambda results: without_trackers(results["parts"]) / results["parts"]["imports_s"]["median"],
        more_is_better=False,
    ),
}


def measured(check: RegressionCheck, scratch: Path) -> Recorded:
    """Do a short run; returns its results.

    Raises:
        UserError: the benchmark failed or took too long.
    """
    output = scratch / f"{check.results}.now"
    words = [word.format(output=output, scratch=scratch) for word in check.command]
    try:
        run([sys.executable, *words], {"OMP_NUM_THREADS": "1"}, TIMEOUT_S)
    except UserError:
        if not output.exists():  # otherwise it has only exceeded a limit of its own
            raise
    return json.loads(output.read_text())


def verdict(now: float, then: float, more_is_better: bool) -> str:
    """Compare a ratio with the committed one, in words."""
    worse = (then / now if more_is_better else now / then) - 1
    if worse > TOLERANCE:
        return f"SLOWER by {worse:.0%}"
    return "better" if worse < -TOLERANCE else "as before"


@clean_exit()
def main() -> None:
    """Measure, and print a line for each check."""
    parser = CommandParser(
        prog="python -m benchmarks.quick",
        description=__doc__ or "",
        examples=["python -m benchmarks.quick", "python -m benchmarks.quick --only sft start"],
    )
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME", help="checks to measure"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark_quick_") as name:
        scratch = Path(name)
        prepare(["quickstart", "--output", str(scratch / "quickstart"), "--samples", "2000"])
        for each in arguments.only:
            check, begun = CHECKS[each], time.monotonic()
            try:
                now = check.ratio(measured(check, scratch))
            except UserError as error:
                print_line(f"{each:<12}not measured: {error}")
                continue
            then = check.ratio(json.loads((ROOT / "benchmarks/results" / check.results).read_text()))
            text = f"{now:8.2f}, committed {then:.2f}: {verdict(now, then, check.more_is_better)}"
            print_line(f"{each:<12}{check.what:<62}{text} ({time.monotonic() - begun:.0f} s)")


if __name__ == "__main__":
    main()
