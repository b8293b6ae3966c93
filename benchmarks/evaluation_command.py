"""The evaluation's own command, timed by the files that it leaves."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.running import run
from eval_pipeline.report.results import read_evaluation


def command_parts(model: Path, overrides: list[str]) -> dict[str, float]:
    """Run it once in a fresh directory; seconds of each part, from the start of the process.

    Args:
        model: Hugging Face model directory.
        overrides: of the recipe humaneval.

    Raises:
        UserError: the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_evaluation_") as directory:
        words = ["run", "--checkpoint", str(model), "--recipe", "humaneval", "--no-wandb", "--output", directory]
        command = [sys.executable, "-m", "eval_pipeline", *words, *overrides]
        begun = time.time()
        run(command)
        return parts_of(Path(directory), begun, time.time())


def parts_of(directory: Path, begun: float, ended: float) -> dict[str, float]:
    """The parts by when files were written last; they add up to `total_s`, and `exit_s` follows.

    Args:
        directory: of the evaluation.
        begun: when the process was started, in seconds since 1970.
        ended: when it had ended.
    """
    [protocol] = directory.glob("work/humaneval/protocol-*.json")
    [verdicts] = directory.glob("work/humaneval/verdicts-*.jsonl")
    metrics = directory / "metrics.json"
    ready, judged, public = (path.stat().st_mtime for path in (protocol, verdicts, metrics))
    result = read_evaluation(directory).datasets["humaneval"]
    num_problems = result.metrics["num_problems"]
    assert num_problems is not None
    return {
        "start_s": ready - begun,
        "answering_s": judged - ready,
        "writing_s": public - judged,
        "total_s": public - begun,
        "exit_s": ended - public,
        "engine_import_s": result.seconds["import_s"],
        "engine_load_s": result.seconds["load_s"],
        "problems_per_s": num_problems / (public - begun),
    }
