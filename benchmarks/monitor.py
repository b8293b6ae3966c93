"""How fast the monitor takes a long run in, and draws it.

The rows are those of a real run's training steps, 17 metrics each. `ingest_s` is from the file to the database, beside
`parse_s`, what parsing the same lines as JSON takes alone. `draw_s` is from opening the run to the points of the charts
that are open at first, and `draw_all_s` to those of all.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import orjson

from benchmarks.harness import bench_parser, write_results
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.monitor.charts import OTHER, charts_for
from verl_ext.monitor.store.database import open_database
from verl_ext.monitor.store.ingest import Ingest
from verl_ext.monitor.view import RunView

ROW = {
    **{"train/loss": 6.260452793394665, "train/lr(1e-3)": 0.05405405405405406, "train/grad_norm": 6.25535249710083},
    **{"train/perplexity": 523.4559038318014, "train/num_loss_tokens": 642.0, "train/epoch": 0.005333333333333333},
    **{
        "train/skipped_steps": 0,
        "system/peak_memory_gib": 1.054718017578125,
        "time/train/data_s": 0.0016479240002809092,
    },
    **{"time/train/forward_backward_s": 0.386758620999899, "time/train/optimizer_s": 0.15876874800051155},
    **{"time/train/step_s": 0.5467054460004874, "train/time(s)": 0.5455273690004105},
    **{"throughput/train/tokens_per_s": 2769.315745939451, "throughput/train/samples_per_s": 58.53243320347584},
    **{"val/num_loss_tokens": 4750.0, "throughput/train/mfu": 0.3812345678901234},
}


def write_run(run_dir: Path, rows: int) -> None:
    """A run whose loss is another one in each row."""
    run_dir.mkdir(parents=True)
    attempt = {"attempt": 1, "start": "2026-01-01T00:00:00+00:00", "end": None, "first_step": 0}
    run = {"status": "running", "project": "p", "experiment": "e", "stage": "sft", "total_steps": rows}
    (run_dir / "run.json").write_text(json.dumps({**run, "attempts": [attempt]}))
    with open(run_dir / "metrics.jsonl", "wb") as file:
        for step in range(1, rows + 1):
            row = {"step": step, "attempt": 1, "time": step / 10, **ROW, "train/loss": 1 + step % 1013 / 1013}
            file.write(orjson.dumps(row) + b"\n")


def measure(directory: Path, rows: int) -> dict[str, float]:
    """Seconds of each part."""
    root = directory / "checkpoints"
    write_run(root / "p/e", rows)
    print_line(f"taking in {rows} rows, about {rows / 50_000:.0f} s", sys.stderr)
    begun = time.perf_counter()
    with open(root / "p/e/metrics.jsonl", "rb") as file:
        for line in file:
            orjson.loads(line)
    parsed = time.perf_counter()
    ingest = Ingest(open_database(directory / "monitor.sqlite"), root)
    [run] = ingest.find_runs()
    ingest.take_all(run)
    taken = time.perf_counter()
    view = RunView(open_database(directory / "monitor.sqlite"), run, root)
    charts = charts_for(view.metrics)
    for metric in (name for chart in charts if chart.place != OTHER for name in chart.metrics):
        view.curve(metric).points()
    drawn = time.perf_counter()
    for metric in (name for chart in charts for name in chart.metrics):
        view.curve(metric).points()
    all_drawn = time.perf_counter()
    return {
        "parse_s": parsed - begun,
        "ingest_s": taken - parsed,
        "draw_s": drawn - taken,
        "draw_all_s": all_drawn - taken,
        "database_mb": (directory / "monitor.sqlite").stat().st_size / 1e6,
        "file_mb": (root / "p/e/metrics.jsonl").stat().st_size / 1e6,
    }


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    parser = bench_parser("monitor", __doc__, "", "--rows 100000 --output FILE.json")
    parser.add_argument("--rows", type=IntArg(), default=1_000_000, help="of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), arguments.rows)
    print_line("  ".join(f"{name} {value:.2f}" for name, value in found.items()))
    write_results({"rows": arguments.rows, **found}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
