"""Useful tokens per second of supervised fine-tuning: ours, a bare loop, stock verl and TRL, in one run.

All train the same model of 26M parameters on the same functions of Python's standard library at their natural lengths,
at most 1024 tokens, on two ranks where they have ranks, in fp32 unless the side's name says bf16. Useful tokens are
those that are not padding. All sides alternate, `--rounds` times. The median counts, and `runs` has each run. The first
step of a run is left out. `--quick` is ours and the packed bare loop, for `benchmarks/run.sh --quick`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness import (
    Numbers,
    Results,
    bench_parser,
    in_rounds,
    medians,
    run,
    run_ranks,
    spread,
    write_job,
    write_results,
)
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

RANKS, BATCH_SIZE, STOCK_BATCH_SIZE, MAX_LENGTH, ROW = 2, 64, 8, 1024, 2048
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
BARE = {
    "bare, padded": ("padded", 1),
    "bare, packed": ("packed", 1),
    "bare, tuned": ("tuned", 1),
    "bare, tuned, 2 ranks": ("tuned", 2),
}
QUICK = ("bare, packed",)
STOCK, BY_TRL = "sft_ranks:stock", "trl_ranks:sft"
BASELINES = {
    "verl as shipped (bf16)": (STOCK, "bf16"),
    "verl in fp32": (STOCK, "fp32"),
    "TRL, like lengths, 4 samples": (BY_TRL, "unpacked_4"),
    "TRL, like lengths, 8 samples": (BY_TRL, "unpacked_8"),
    "TRL, like lengths, 8 samples, bf16": (BY_TRL, "unpacked_8_bf16"),
    "TRL, packed, 1 row": (BY_TRL, "packed_1"),
    "TRL, packed, 2 rows": (BY_TRL, "packed_2"),
}


@dataclass(frozen=True)
class SFTJob:
    """What the ranks of a side train.

    Attributes:
        data: parquet file of chats.
        model: directory of the model.
        output: directory to write into.
        batch_size: samples of a step, over all ranks.
        num_steps: steps; the first is not counted.
        max_length: tokens of a sample; longer ones are cut.
        variant: of the side.
        lr: constant.
    """

    data: str
    model: str
    output: str
    batch_size: int
    num_steps: int
    max_length: int
    variant: str
    lr: float = 1e-4


class SFTSides:
    """The sides of the comparison; each method returns useful tokens per second of one run.

    Args:
        scratch: directory with the inputs.
        num_steps: of each run; the first is left out.
    """

    def __init__(self, scratch: Path, num_steps: int) -> None:
        self._scratch, self._num_steps = scratch, num_steps

    def ours(self, *overrides: str, precision: str = "fp32") -> float:
        """`run_sft.sh`, by its metrics."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            settings = {
                "prepare": "[]",
                "data.train_files": self._scratch / "chats/train.parquet",
                "data.val_files": "null",
                "data.max_length": MAX_LENGTH,
                "data.truncation": "right",
                "data.train_batch_size": BATCH_SIZE,
                "data.max_tokens_per_gpu": ROW,
                "data.token_cache": self._scratch / "tokens",
                "model.partial_pretrain": self._scratch / "model",
                "model.mixed_precision": precision,
                "trainer.total_training_steps": self._num_steps,
                "trainer.save_freq": -1,
                "trainer.test_freq": -1,
                "trainer.checkpoint.save_contents": "[model]",
                "trainer.logger": "[console]",
                "trainer.default_local_dir": directory,
            }
            words = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
            run(["bash", "run_sft.sh", str(RANKS), *words], VERL_EXT_PYTHON=sys.executable, **ONE_THREAD)
            rows = [row for row in read_metrics(Path(directory, METRICS_FILE)) if "train/loss" in row]
        seconds = [row["time/train/step_s"] for row in rows]
        rates = [row["throughput/train/tokens_per_s"] for row in rows]
        return rate_of([{"tokens": rate * step_s, "seconds": step_s} for rate, step_s in zip(rates, seconds)])

    def bare(self, variant: str, ranks: int) -> float:
        """A bare loop."""
        return self._run_ranks("sft_ranks:bare", variant, ranks, BATCH_SIZE, self._num_steps)

    def baseline(self, function: str, variant: str) -> float:
        """Another trainer; stock verl gets small batches, because it pads each sample to the longest possible."""
        if function == STOCK:
            return self._run_ranks(function, variant, RANKS, STOCK_BATCH_SIZE, 3)
        return self._run_ranks(function, variant, RANKS, BATCH_SIZE, self._num_steps)

    def _run_ranks(self, function: str, variant: str, ranks: int, batch_size: int, num_steps: int) -> float:
        scratch = self._scratch
        inputs = str(scratch / "chats/train.parquet"), str(scratch / "model"), str(scratch / "out")
        job = write_job(SFTJob(*inputs, batch_size, num_steps, MAX_LENGTH, variant), scratch / "job.json")
        steps, _ = run_ranks(function, job, ranks, {**ONE_THREAD, "OMP_NUM_THREADS": str(2 // ranks)})
        return rate_of(steps)


def rate_of(steps: Sequence[Numbers]) -> float:
    """Useful tokens per second of a run's steps, the first left out."""
    return sum(step["tokens"] for step in steps[1:]) / sum(step["seconds"] for step in steps[1:])


def measure(scratch: Path, rounds: int, num_steps: int, quick: bool) -> Results:
    """Tokens per second of each side, and ours relative to it."""
    run_of = SFTSides(scratch, num_steps)
    sides: dict[str, Callable[[], float]] = {"ours": run_of.ours}
    sides |= {name: partial(run_of.bare, *BARE[name]) for name in (QUICK if quick else BARE)}
    if not quick:
        twice = f"trainer.total_training_steps={2 * num_steps}"
        sides["ours, bf16"] = partial(run_of.ours, precision="bf16")
        sides["ours, compiled"] = partial(run_of.ours, "model.compile=true", twice)
        sides |= {name: partial(run_of.baseline, *how) for name, how in BASELINES.items()}
    runs = in_rounds(sides, rounds, "training")
    rates = medians([dict(zip(runs, numbers)) for numbers in zip(*runs.values())])
    return {"tokens_per_s": rates, "runs": runs, "ours_over": {name: rates["ours"] / rates[name] for name in rates}}


@clean_exit()
def main() -> None:
    """Measure, print and write the results."""
    parser = bench_parser("sft", __doc__, "--quick", "--output FILE.json")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="runs of each side")
    parser.add_argument("--num-steps", type=IntArg(2), default=4, help="of a run; the first is left out")
    parser.add_argument("--quick", action="store_true", help="only ours and one bare loop")
    arguments = parser.parse_args()
    from benchmarks.sft_ranks import write_inputs  # here, because torch takes seconds to import

    with tempfile.TemporaryDirectory(prefix="benchmark_sft_") as scratch:
        write_inputs(Path(scratch))
        found = measure(Path(scratch), arguments.rounds, arguments.num_steps, arguments.quick)
    for name, runs in found["runs"].items():
        print_line(f"{name:<36}tokens/s {spread(runs, '.0f'):<24}{found['ours_over'][name]:8.2f}")
    job = {"ranks": RANKS, "samples_per_step": BATCH_SIZE, "max_length": MAX_LENGTH}
    versions = {name: version(name) for name in ("verl", "trl")}
    write_results({**job, **found, "versions": versions}, arguments.output)


if __name__ == "__main__":
    main()
