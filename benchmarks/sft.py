"""Useful tokens per second of supervised fine-tuning: ours, a bare loop, stock verl and TRL, in one run.

All sides train the same model with 26M parameters on the same functions of Python's standard library at their natural
lengths, at most 1024 tokens, on two ranks if they support ranks, in fp32 unless the side's name says bf16. Useful
tokens exclude padding. All sides alternate, `--rounds` times. Results are medians, and `runs` lists each run. The first
step of a run is excluded. `--quick` measures only ours and the packed bare loop, for `benchmarks/run.sh --quick`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import Numbers, Results, bench_parser, in_rounds, run, run_ranks, spread, write_results
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

RANKS, BATCH_SIZE, STOCK_BATCH_SIZE, MAX_LENGTH, ROW = 2, 64, 8, 1024, 2048
LR = 1e-4
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
STOCK, STOCK_STEPS = "sft_ranks:stock", 3
BARE = {
    "bare, padded": ("sft_ranks:bare", "padded", 1),
    "bare, packed": ("sft_ranks:bare", "packed", 1),
    "bare, tuned": ("sft_ranks:bare", "tuned", 1),
    "bare, tuned, 2 ranks": ("sft_ranks:bare", "tuned", 2),
}
TRAINERS = {
    "verl as shipped (bf16)": (STOCK, "bf16", RANKS),
    "verl in fp32": (STOCK, "fp32", RANKS),
    "TRL, like lengths, 4 samples": ("trl_ranks:sft", "unpacked_4", RANKS),
    "TRL, like lengths, 8 samples": ("trl_ranks:sft", "unpacked_8", RANKS),
    "TRL, like lengths, 8 samples, bf16": ("trl_ranks:sft", "unpacked_8_bf16", RANKS),
    "TRL, packed, 1 row": ("trl_ranks:sft", "packed_1", RANKS),
    "TRL, packed, 2 rows": ("trl_ranks:sft", "packed_2", RANKS),
}
BASELINES = BARE | TRAINERS
"""Function, variant and number of ranks of each side except ours."""
QUICK = "bare, packed"


# One run of a side: non-padding tokens per second


def our_rate(scratch: Path, num_steps: int, *overrides: str) -> float:
    """Run `run_sft.sh`; returns the rate from its metrics.

    Args:
        scratch: directory with the inputs.
        num_steps: steps of the run.
        overrides: overrides of the configuration.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        settings = {
            "prepare": "[]",
            "data.train_files": scratch / "chats/train.parquet",
            "data.val_files": "null",
            "data.max_length": MAX_LENGTH,
            "data.truncation": "right",
            "data.train_batch_size": BATCH_SIZE,
            "data.max_tokens_per_gpu": ROW,
            "data.token_cache": scratch / "tokens",
            "model.partial_pretrain": scratch / "model",
            "model.mixed_precision": "fp32",
            "trainer.total_training_steps": num_steps,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.checkpoint.save_contents": "[model]",
            "trainer.logger": "[console]",
            "trainer.default_local_dir": directory,
        }
        words = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
        run(["bash", "run_sft.sh", str(RANKS), *words], {"VERL_EXT_PYTHON": sys.executable, **ONE_THREAD})
        rows = [row for row in read_metrics(Path(directory, METRICS_FILE)) if "train/loss" in row]
    steps = [(row["throughput/train/tokens_per_s"], row["time/train/step_s"]) for row in rows]
    return rate_of([{"tokens": rate * seconds, "seconds": seconds} for rate, seconds in steps])


def rate_of_ranks(scratch: Path, num_steps: int, function: str, variant: str, ranks: int) -> float:
    """Run a side of `BASELINES`. Stock verl does few steps, because it pads each sample to the maximum length."""
    variables = {**ONE_THREAD, "OMP_NUM_THREADS": str(2 // ranks)}
    words = str(scratch), variant, str(STOCK_STEPS if function == STOCK else num_steps)
    return rate_of(run_ranks(function, *words, ranks=ranks, variables=variables))


def rate_of(steps: Sequence[Numbers]) -> float:
    """Useful tokens per second of a run's steps, excluding the first."""
    return sum(step["tokens"] for step in steps[1:]) / sum(step["seconds"] for step in steps[1:])


# The measurement


def measure(scratch: Path, rounds: int, num_steps: int, quick: bool) -> Results:
    """Tokens per second of each side, and ours relative to it."""
    ours = partial(our_rate, scratch, num_steps)
    sides: dict[str, Callable[[], float]] = {"ours": ours}
    if not quick:
        compiled = "model.compile=true", f"trainer.total_training_steps={2 * num_steps}"
        sides |= {"ours, bf16": partial(ours, "model.mixed_precision=bf16"), "ours, compiled": partial(ours, *compiled)}
    baselines = [QUICK] if quick else [*BASELINES]
    sides |= {name: partial(rate_of_ranks, scratch, num_steps, *BASELINES[name]) for name in baselines}
    runs = in_rounds(sides, rounds, "training")
    rates = {name: statistics.median(found) for name, found in runs.items()}
    return {"tokens_per_s": rates, "runs": runs, "ours_over": {name: rates["ours"] / rates[name] for name in rates}}


@clean_exit()
def main() -> None:
    """Measure, print and write the results."""
    parser = bench_parser("sft", __doc__, "--quick", "--output FILE.json")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="runs of each side")
    parser.add_argument("--num-steps", type=IntArg(2), default=4, help="steps of a run; the first is excluded")
    parser.add_argument("--quick", action="store_true", help="only ours and one bare loop")
    arguments = parser.parse_args()
    from benchmarks.sft_ranks import write_inputs  # here, because torch takes seconds to import

    with tempfile.TemporaryDirectory(prefix="benchmark_sft_") as scratch:
        write_inputs(Path(scratch))
        found = measure(Path(scratch), arguments.rounds, arguments.num_steps, arguments.quick)
    for name, runs in found["runs"].items():
        print_line(f"{name:<36}tokens/s {spread(runs, '.0f'):<24}{found['ours_over'][name]:8.2f}")
    job = {"ranks": RANKS, "samples_per_step": BATCH_SIZE, "max_length": MAX_LENGTH}
    write_results({**job, **found}, arguments.output, ("verl", "trl"))


if __name__ == "__main__":
    main()
