"""One evaluation from checkpoint to figures: answer, judge, sum up, write."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_pipeline.checkpoint import Checkpoint, find_checkpoint
from eval_pipeline.engine import Generation
from eval_pipeline.extract import extract_code
from eval_pipeline.generation import generate_in_child
from eval_pipeline.hold import held
from eval_pipeline.judge import Submission, judge_all
from eval_pipeline.metrics import summarize
from eval_pipeline.problems import Problem, dataset_name, load_problems
from eval_pipeline.report import Figures, format_table, prepare_output, write_metrics, write_qa_log
from eval_pipeline.run_config import RunConfig, read_run_config
from eval_pipeline.sandbox import ISOLATION_LEVEL, Limits
from eval_pipeline.tracking import log_to_wandb, wandb_figures
from eval_pipeline.verdict import Verdict
from verl_ext.errors import UserError


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    checkpoint: Path
    problems: Path | None = None
    """None takes `eval.problems` of the training run."""
    limit: int | None = None
    """Judge only this many problems from the top."""
    max_tokens: int = 2048
    output: Path | None = None
    """None takes the checkpoint's default."""
    wandb: bool = True
    limits: Limits = Limits()


def evaluate(options: Options) -> Path:
    """Evaluate one checkpoint on one data set; prints a table and writes the files.

    Returns:
        The path of `metrics.json`.

    Raises:
        UserError: the checkpoint, the problems or the output directory cannot be used.
        OSError: the disk filled up, or this machine could not start another process.
    """
    checkpoint = find_checkpoint(options.checkpoint)
    with held(checkpoint):
        return _evaluate(checkpoint, options)


def _evaluate(checkpoint: Checkpoint, options: Options) -> Path:
    run_config = read_run_config(checkpoint.run_dir)
    problems_file = _problems_file(options, run_config)
    problems = load_problems(problems_file, options.limit)
    output = (options.output or checkpoint.default_output).resolve()
    prepare_output(output)

    generation = generate_in_child(checkpoint.export, [problem.prompt for problem in problems], options.max_tokens)
    codes, verdicts, judge_s = _judge(problems, generation, options.limits)
    seconds = {**generation.seconds, "judge_s": judge_s}
    figures = summarize(generation.answers, verdicts, elapsed_s=seconds["generate_s"] + judge_s)

    dataset = dataset_name(problems_file)
    settings = _settings(checkpoint, problems_file, generation, options.limits)
    write_qa_log(output, dataset, problems, generation.answers, codes, verdicts)
    path = write_metrics(output, {**settings, "seconds": seconds, "datasets": {dataset: figures}})
    print(_summary(checkpoint, dataset, figures, path))
    if options.wandb:
        log_to_wandb(checkpoint, run_config, checkpoint.run_dir or output, settings, wandb_figures(dataset, figures))
    return path


def _problems_file(options: Options, run_config: RunConfig) -> Path:
    path = options.problems or run_config.problems
    if path is None:
        raise UserError("No problems to judge on; name a file with --problems, or set eval.problems in the recipe.")
    return path


def _judge(problems: list[Problem], generation: Generation, limits: Limits) -> tuple[list[str], list[Verdict], float]:
    """Code and verdict of each answer, and the wall-clock seconds that judging took."""
    started = time.monotonic()
    pairs = list(zip(problems, generation.answers, strict=True))
    codes = [extract_code(answer.text, problem.entry_point) for problem, answer in pairs]
    submissions = [
        Submission(code, problem.tests, error=answer.error)
        for code, (problem, answer) in zip(codes, pairs, strict=True)
    ]
    verdicts = judge_all(submissions, limits)
    return codes, verdicts, time.monotonic() - started


def _settings(checkpoint: Checkpoint, problems_file: Path, generation: Generation, limits: Limits) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "checkpoint": str(checkpoint.path),
        "problems": str(problems_file.resolve()),
        "isolation": ISOLATION_LEVEL,
        "protocol": {**generation.protocol, "limits": dataclasses.asdict(limits)},
    }


def _summary(checkpoint: Checkpoint, dataset: str, figures: Figures, path: Path) -> str:
    table = format_table(dataset, figures)
    return f"{checkpoint.label}, isolation {ISOLATION_LEVEL}\n{table}\nwritten to {path.parent}"
