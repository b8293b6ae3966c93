"""Useful tokens per second of supervised fine-tuning: ours beside a bare loop, stock verl and TRL, in one run.

All train the same model of 26M parameters on the same functions of Python's standard library at their natural lengths,
at most 1024 tokens, on two ranks where they have ranks, in fp32 unless the side's name says bf16. A token is useful if
it is no padding. All sides take turns, `--rounds` times; a side's figure is its median, and `runs` has each. Each first
step is left out. `--quick` is ours beside the packed bare loop alone, for `benchmarks/run.sh --quick`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.running import ROOT, run
from benchmarks.sft_job import Job
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line, progress_bar
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
PEERS = {
    "verl as shipped (bf16)": ("sft_stock", "bf16"),
    "verl in fp32": ("sft_stock", "fp32"),
    "TRL, like lengths, 4 samples": ("sft_peer", "unpacked_4"),
    "TRL, like lengths, 8 samples": ("sft_peer", "unpacked_8"),
    "TRL, like lengths, 8 samples, bf16": ("sft_peer", "unpacked_8_bf16"),
    "TRL, packed, 1 row": ("sft_peer", "packed_1"),
    "TRL, packed, 2 rows": ("sft_peer", "packed_2"),
}


class Bench:
    """Starts the sides.

    Args:
        scratch: directory with the inputs.
        num_steps: of each run; the first is left out.
    """

    def __init__(self, scratch: Path, num_steps: int) -> None:
        self.scratch, self.num_steps = scratch, num_steps

    def ours(self, *more: str, precision: str = "fp32") -> float:
        """Useful tokens per second of `run_sft.sh`, as its metrics have them."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            settings = {
                "prepare": "[]",
                "data.train_files": self.scratch / "chats/train.parquet",
                "data.val_files": "null",
                "data.max_length": MAX_LENGTH,
                "data.truncation": "right",
                "data.train_batch_size": BATCH_SIZE,
                "data.max_tokens_per_gpu": ROW,
                "data.token_cache": self.scratch / "tokens",
                "model.partial_pretrain": self.scratch / "model",
                "model.mixed_precision": precision,
                "trainer.total_training_steps": self.num_steps,
                "trainer.save_freq": -1,
                "trainer.test_freq": -1,
                "trainer.checkpoint.save_contents": "[model]",
                "trainer.logger": "[console]",
                "trainer.default_local_dir": directory,
            }
            words = [*(f"{key}={value}" for key, value in settings.items()), *more]
            run(["bash", "run_sft.sh", str(RANKS), *words], VERL_EXT_PYTHON=sys.executable, **ONE_THREAD)
            rows = [row for row in read_metrics(Path(directory, METRICS_FILE)) if "train/loss" in row]
        seconds = [row["time/train/step_s"] for row in rows[1:]]
        tokens = [row["throughput/train/tokens_per_s"] * row["time/train/step_s"] for row in rows[1:]]
        return sum(tokens) / sum(seconds)

    def bare(self, way: str, ranks: int) -> float:
        """The same of a bare loop."""
        return rate_of(self._started("sft_bare", way, ranks, BATCH_SIZE, self.num_steps))

    def peers(self, module: str, way: str) -> float:
        """The same of a peer; stock verl gets small batches, for it pads each sample to the longest there may be."""
        if module == "sft_stock":
            return rate_of(self._started(module, way, RANKS, STOCK_BATCH_SIZE, 3))
        return rate_of(self._started(module, way, RANKS, BATCH_SIZE, self.num_steps))

    def _started(self, module: str, way: str, ranks: int, batch_size: int, num_steps: int) -> str:
        scratch = self.scratch
        inputs = str(scratch / "chats/train.parquet"), str(scratch / "model"), str(scratch / "out")
        path = Job(*inputs, batch_size, num_steps, MAX_LENGTH, way).save(scratch / "job.json")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        variables = {**ONE_THREAD, "OMP_NUM_THREADS": str(2 // ranks), "PYTHONPATH": str(ROOT)}
        return run([sys.executable, *launch, "-m", "benchmarks.side", module, str(path)], **variables)


def rate_of(output: str) -> float:
    """Useful tokens per second of the steps that a side printed, the first left out."""
    steps = [json.loads(line.removeprefix("STEP ")) for line in output.splitlines() if line.startswith("STEP ")]
    return sum(step["tokens"] for step in steps[1:]) / sum(step["seconds"] for step in steps[1:])


def measure(bench: Bench, rounds: int, quick: bool) -> dict[str, Any]:
    """All figures: tokens per second by side, and what ours is of them."""
    sides: dict[str, Callable[[], float]] = {"ours": bench.ours}
    sides |= {name: partial(bench.bare, *BARE[name]) for name in (QUICK if quick else BARE)}
    if not quick:
        steps = f"trainer.total_training_steps={2 * bench.num_steps}"
        sides["ours, bf16"] = partial(bench.ours, precision="bf16")
        sides["ours, compiled"] = partial(bench.ours, "model.compile=true", steps)
        sides |= {name: partial(bench.peers, *how) for name, how in PEERS.items()}
    runs: dict[str, list[float]] = {name: [] for name in sides}
    with progress_bar(total=rounds * len(sides), desc="training", unit="runs") as bar:
        for _ in range(rounds):
            for name, side in sides.items():
                runs[name].append(side())
                bar.update()
    rates = {name: statistics.median(found) for name, found in runs.items()}
    return {"tokens_per_s": rates, "runs": runs, "ours_over": {name: rates["ours"] / rates[name] for name in rates}}


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    parser = bench_parser("sft", __doc__, "--quick", "--output FILE.json")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="runs of each side")
    parser.add_argument("--num-steps", type=IntArg(2), default=4, help="of a run; the first is left out")
    parser.add_argument("--quick", action="store_true", help="ours and one bare loop alone")
    arguments = parser.parse_args()
    from benchmarks.sft_inputs import write_inputs  # here, as torch takes seconds to import

    with tempfile.TemporaryDirectory(prefix="benchmark_sft_") as scratch:
        write_inputs(Path(scratch))
        found = measure(Bench(Path(scratch), arguments.num_steps), arguments.rounds, arguments.quick)
    job = {"ranks": RANKS, "samples_per_step": BATCH_SIZE, "max_length": MAX_LENGTH}
    for name, rate in found["tokens_per_s"].items():
        runs = found["runs"][name]
        spread = f"{min(runs):.0f} to {max(runs):.0f}"
        print_line(f"{name:<32}{rate:8.0f} tokens/s  ({spread}){found['ours_over'][name]:10.2f}")
    versions = {name: version(name) for name in ("verl", "trl")}
    write_figures({**job, **found, "versions": versions}, arguments.output)


if __name__ == "__main__":
    main()
