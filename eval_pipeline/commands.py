"""The commands `watch`, `run`, `report`, `status`, `retry` and `check`: their arguments and actions.

`--help` must respond immediately, so each function imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.cli import FAILURES, CommandParser, Commands, IntArg, add_command
from verl_ext.commands import program
from verl_ext.console import aligned_rows, print_line, print_summary, typed_path
from verl_ext.errors import UserError
from verl_ext.paths import base_directory, caller_directory

if TYPE_CHECKING:
    from eval_pipeline.config import EvalConfig
    from eval_pipeline.jobs import Job
    from eval_pipeline.report.results import EvaluatedModel

Action = Callable[[argparse.Namespace], int]

PROGRAM = program("eval")
RECIPE_EXAMPLE = """\
recipes/eval/NAME.yaml sets the datasets, the sampling, the engine and the limits. key=value overrides one of its keys,
such as sampling.max_tokens=512 or datasets.quickstart.limit=20."""
RUN_EXAMPLE = "checkpoints/rlvr_coding_model/sft_quickstart"


# Arguments


def input_path(text: str) -> Path:
    """Resolve a path to read, relative to the caller's directory, or to the base directory if it exists only there.

    Args:
        text: as typed; `~` is the home directory.
    """
    path = Path(text).expanduser()
    here, there = caller_directory() / path, base_directory() / path
    return there if there.exists() and not here.exists() else here


def output_path(text: str) -> Path:
    """Resolve a path to write, relative to the caller's directory. See `input_path` for `text`."""
    return caller_directory() / Path(text).expanduser()


input_path.__name__ = output_path.__name__ = "path"  # argparse names the function in its messages


def add_action(
    commands: Commands, name: str, text: str, action: Action, *, examples: Sequence[str], **settings: Any
) -> CommandParser:
    """Add a command.

    Args:
        text: description; see `add_command`.
        action: takes the parsed arguments and returns the exit code.
        examples: arguments of the example commands.
        settings: passed on to `add_command`.
    """
    start = settings.setdefault("prog", f"{PROGRAM} {name}")
    typed = [f"{start} {example}" for example in examples]
    parser = add_command(commands, name, text, examples=typed, **settings)
    parser.set_defaults(action=action, typed_again="resumes")
    return parser


def add_recipe(parser: CommandParser) -> None:
    """Add the arguments that select and change the recipe."""
    parser.add_argument("--recipe", metavar="NAME", help="evaluation recipe (default: the run's, or quickstart)")
    parser.add_argument("--no-wandb", action="store_true", help="do not log to W&B")
    add_overrides(parser)


def add_overrides(parser: CommandParser) -> None:
    """Add `key=value` overrides."""
    parser.keys = _recipe_keys
    # without a default, argparse would list it as required
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="override a key of the recipe")


def _recipe_keys(words: Sequence[str]) -> list[str]:
    """The keys of a recipe. Called only for suggestions, because the import takes a second."""
    from eval_pipeline.config import EvalConfig
    from verl_ext.config.schema import keys

    return list(keys(EvalConfig))


def add_directory(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the directory of a run. It stays text until `__main__.parse` has separated it from overrides."""
    parser.add_argument("directory", metavar="RUN_DIR", help=what)


def load_config(arguments: argparse.Namespace, run_dir: Path | None) -> EvalConfig:
    """Load the configuration that the arguments of `add_recipe` select; the training run's recipe is the default."""
    from eval_pipeline.recipe import config_for_run

    config = config_for_run(arguments.recipe, arguments.overrides, run_dir)
    return replace(config, wandb=False) if arguments.no_wandb else config


def refuse_server(overrides: Sequence[str], command: str) -> None:
    """Refuse `engine.kind=openai` for a command that loads its models, before the URL that it needs is asked for."""
    from eval_pipeline.config import EngineConfig

    if "engine.kind=openai" in overrides:
        EngineConfig(kind="openai").require_own_model(command)


# watch


def add_watch(commands: Commands) -> None:
    """Register `watch` and its options."""
    parser = add_action(
        commands,
        "watch",
        "Evaluate every checkpoint of a run as it appears, and select the best. Ends when the run has finished and "
        "every checkpoint is evaluated. If it is killed, the same command resumes. Several watchers of one run share "
        "the work.",
        watch,
        examples=[RUN_EXAMPLE],
        notes=RECIPE_EXAMPLE,
        exit_codes={
            "0": "the run has finished and its checkpoints are evaluated",
            "1": "an evaluation failed, or there was no checkpoint to evaluate",
            **FAILURES,
        },
    )
    add_directory(parser, "directory of the training run; it may still be empty")
    add_recipe(parser)


def watch(arguments: argparse.Namespace) -> int:
    """Watch a run; returns 1 if a job failed, or no checkpoint could be evaluated."""
    from eval_pipeline.checkpoints import eval_dir_of_run
    from eval_pipeline.run import EvalContext
    from eval_pipeline.watch import RunStartedError, watch_run

    refuse_server(arguments.overrides, "watch")
    directory = eval_dir_of_run(arguments.directory)
    recipe = [] if arguments.recipe is None else ["--recipe", arguments.recipe]
    while True:
        config = load_config(arguments, directory.run_dir)
        config.engine.require_own_model("watch")
        with suppress(RunStartedError):  # load the configuration again
            return watch_run(EvalContext(directory, config), [*recipe, *arguments.overrides])


# run


def add_run(commands: Commands) -> None:
    """Register `run` and its options."""
    parser = add_action(
        commands,
        "run",
        "Evaluate one checkpoint, or any Hugging Face model. Answers from an interrupted run are reused.",
        run,
        examples=[
            f"--checkpoint {RUN_EXAMPLE}/global_step_750",
            "--checkpoint models/mine --recipe humaneval sampling.max_tokens=512",
            "--output results --recipe gsm8k engine.kind=openai engine.base_url=http://localhost:8000/v1",
        ],
        notes="""\
The results of a run's checkpoint go to <run>/eval/eval_step_N/. With --limit or --problems, they go to
<run>/eval/trial_step_N/ and do not affect the selection of the best checkpoint. The results of any other model go to
eval_<name> next to the model.""",
        exit_codes={"0": "done", "1": "an evaluation failed", **FAILURES},
    )
    parser.add_argument("--checkpoint", type=input_path, metavar="DIR", help="global_step_N or a model directory")
    parser.add_argument("--tier", type=int, choices=(1, 2, 3), default=1, help="last tier of datasets to evaluate")
    parser.add_argument(
        "--problems",
        type=input_path,
        metavar="FILE",
        help="use this file, in the quickstart's format, instead of the recipe's datasets",
    )
    parser.add_argument("--limit", type=IntArg(), help="at most N problems per dataset, sampled across it")
    parser.add_argument("--output", type=output_path, metavar="DIR", help="output directory (default: see below)")
    add_recipe(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model; returns 1 if a job failed."""
    from eval_pipeline.checkpoints import eval_dir_of_checkpoint, find_checkpoint, served_checkpoint
    from eval_pipeline.run import EvalContext
    from eval_pipeline.watch import evaluate_checkpoint

    checkpoint = None if arguments.checkpoint is None else find_checkpoint(arguments.checkpoint)
    config = load_config(arguments, None if checkpoint is None else checkpoint.run_dir)
    if config.engine.kind == "openai":
        from eval_pipeline.engines.openai_engine import find_served_model

        model = find_served_model(config.engine, None if checkpoint is None else checkpoint.export)
        checkpoint = checkpoint or served_checkpoint(model, caller_directory())
        # pin the model's name, so that no other model is used if the server changes
        config = replace(config, engine=replace(config.engine, model=model.id))
    if checkpoint is None:
        raise UserError(
            "no model is specified; use --checkpoint DIR, or set engine.kind=openai to evaluate a server's model"
        )
    if arguments.problems is not None:
        config = with_problems(config, arguments.problems)
    if arguments.limit is not None:
        config = _with_sample(config, arguments.limit)
    is_trial = arguments.problems is not None or arguments.limit is not None
    directory = eval_dir_of_checkpoint(checkpoint, arguments.output, is_trial)
    return evaluate_checkpoint(EvalContext(directory, config), checkpoint, arguments.tier)


def with_problems(config: EvalConfig, problems: Path) -> EvalConfig:
    """Replace the datasets by a file, named after it, or after its folder if it is called `problems`."""
    from eval_pipeline.config import TiersConfig

    name, folder = problems.name.partition(".")[0], problems.resolve().parent.name
    if name in ("", "problems") and folder:
        name = folder
    datasets = {name: {"format": "quickstart", "path": str(problems.absolute())}}
    selection = replace(config.selection, dataset=None)
    return replace(config, datasets=datasets, tiers=TiersConfig(tier1=[name]), selection=selection)


def _with_sample(config: EvalConfig, size: int) -> EvalConfig:
    """Limit each dataset to a sample."""
    from eval_pipeline.problems.datasets import SAMPLE_SEED

    print_line(
        f"--limit {size}: at most {size} problems of each dataset, sampled across its file with seed {SAMPLE_SEED}; "
        "every checkpoint and every run gets the same problems",
        sys.stderr,
    )
    return replace(config, datasets={name: {**entry, "sample": size} for name, entry in config.datasets.items()})


# report


def add_report(commands: Commands) -> None:
    """Register `report` and its options."""
    parser = add_action(
        commands,
        "report",
        "Compare a run's best checkpoint with its base model, or with another of its checkpoints. The base model or "
        "checkpoint is evaluated first on the same datasets, unless it has already been evaluated with these settings.",
        report,
        examples=[f"{RUN_EXAMPLE} --baseline data/quickstart/model"],
        notes="Writes comparison_table.md, comparison_data.json and plots to <run>/eval/report/.",
        exit_codes={"0": "done", "1": "the evaluation of the baseline failed", **FAILURES},
    )
    add_directory(parser, "directory of an evaluated training run")
    parser.add_argument(
        "--baseline",
        type=input_path,
        required=True,
        metavar="MODEL",
        help="directory of the base model or of a checkpoint of the run",
    )
    add_recipe(parser)


def report(arguments: argparse.Namespace) -> int:
    """Evaluate the baseline if necessary, and write the report; returns 1 if a job failed."""
    from eval_pipeline.checkpoints import base_model, eval_dir_of_run, find_checkpoint
    from eval_pipeline.config import TIERS
    from eval_pipeline.recipe import restrict_datasets
    from eval_pipeline.report.report import write_report
    from eval_pipeline.report.results import read_evaluation
    from eval_pipeline.report.selection import read_best_checkpoint
    from eval_pipeline.run import EvalContext
    from eval_pipeline.watch import evaluate_checkpoint

    refuse_server(arguments.overrides, "report")
    directory = eval_dir_of_run(arguments.directory)
    config = load_config(arguments, directory.run_dir)
    config.engine.require_own_model("report")
    best = read_evaluation(directory.results_of(f"step_{read_best_checkpoint(directory.of_run).step}"))
    baseline = find_checkpoint(arguments.baseline)
    step = baseline.step if baseline.run_dir == directory.run_dir else None
    context = EvalContext(directory, restrict_datasets(config, best.datasets))
    if step is None or not context.has_results(baseline, max(TIERS)):
        # under another label, so that results with these settings do not replace those of the run's checkpoint
        baseline = base_model(arguments.baseline)
        context = EvalContext(directory, restrict_datasets(_with_dtype_of(best, config), best.datasets))
    if evaluate_checkpoint(context, baseline, max(TIERS)) != 0:
        return 1
    not_run = [
        name for name in context.config.tiers.names if not any(problem.runs_code for problem in context.problems(name))
    ]
    table = write_report(directory, baseline.label, step, not_run)
    rows = {"report": typed_path(table), "plots": typed_path(table.parent / "*.png")}
    print_summary(f"Finished: report on {directory.of_run.name}", rows)
    return 0


def _with_dtype_of(best: EvaluatedModel, config: EvalConfig) -> EvalConfig:
    """The configuration for a model that is compared with this one; `auto` would follow the weights."""
    if config.engine.dtype != "auto":
        return config
    dtype = next(iter(best.datasets.values())).protocol.get("dtype", "auto")
    return replace(config, engine=replace(config.engine, dtype=dtype))


# status


def add_status(commands: Commands) -> None:
    """Register `status` and its options."""
    parser = add_action(
        commands,
        "status",
        "Show the state, failures, duration, worker and error of every evaluation of a run.",
        status,
        examples=[RUN_EXAMPLE],
        exit_codes={"0": "no evaluation has failed", "1": "an evaluation has failed", **FAILURES},
    )
    add_directory(parser, "directory of a run, or of an evaluation")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with all times")


def status(arguments: argparse.Namespace) -> int:
    """Print one line per job; returns 1 if one failed."""
    from eval_pipeline.checkpoints import find_eval_dir
    from eval_pipeline.jobs import JobQueue

    jobs = JobQueue(find_eval_dir(arguments.directory).root).jobs()
    if arguments.json:
        for job in jobs:
            print_line(json.dumps(asdict(job)))
    else:
        _print_jobs(jobs)
    return int(any(job.state == "failed" for job in jobs))


def _print_jobs(jobs: Sequence[Job]) -> None:
    rows: list[tuple[str, ...]] = [("checkpoint", "dataset", "tier", "state", "failures", "seconds", "worker")]
    for job in jobs:
        seconds = f"{job.seconds['active_s']:.0f}" if "active_s" in job.seconds else "-"
        tier, failures = str(job.tier), str(job.attempts)
        rows.append((job.checkpoint, job.dataset, tier, job.state, failures, seconds, job.worker or "-"))
    header, *lines = aligned_rows(rows)
    print_line(header)
    for line, job in zip(lines, jobs, strict=True):
        print_line(line)
        if job.error is not None:
            wait = job.not_before - time.time()
            when = f"next attempt in {wait:.0f} s; " if job.state == "pending" and wait > 0 else ""
            print_line(f"    {when}{job.error}")


# retry


def add_retry(commands: Commands) -> None:
    """Register `retry` and its options."""
    parser = add_action(
        commands,
        "retry",
        "Re-queue every evaluation of a run that failed or has answers without a verdict. The next `watch` or `run` "
        "repeats them and reuses stored answers and verdicts.",
        retry,
        examples=[RUN_EXAMPLE],
    )
    add_directory(parser, "directory of a run, or of an evaluation")


def retry(arguments: argparse.Namespace) -> int:
    """Re-queue jobs and print them."""
    from eval_pipeline.checkpoints import find_eval_dir
    from eval_pipeline.jobs import JobQueue
    from eval_pipeline.report.results import read_evaluation

    directory = find_eval_dir(arguments.directory)
    queue = JobQueue(directory.root)
    incomplete: dict[tuple[str, str], int] = {}
    for label in dict.fromkeys(job.checkpoint for job in queue.jobs() if job.state == "done"):
        with suppress(UserError):  # not published yet; the next `watch` or `run` publishes it
            published = read_evaluation(directory.results_of(label))
            incomplete |= {(label, name): num for name, num in published.incomplete.items()}
    due = queue.retry(incomplete=incomplete)
    for job in due:
        if job.state == "done":
            reason = f"{incomplete[job.key]} answers without a verdict"
        else:
            reason = "failed: " + (job.error or "").partition("\n")[0]
        print_line(f"Re-queued: {job} ({reason})")
    if not due:
        print_line("No evaluation has failed or is incomplete, so there is nothing to retry.")
    return 0


# check


def add_check(commands: Commands) -> None:
    """Register `check` and its options."""
    parser = add_action(
        commands,
        "check",
        "Check a recipe without evaluating anything. Reads the problems of its local datasets and tests the sandbox.",
        check,
        examples=["--recipe humaneval"],
        notes=RECIPE_EXAMPLE,
    )
    parser.add_argument("--watch", action="store_true", help="also check that `watch` can use the recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--recipe", metavar="NAME", help="recipe to check (default: quickstart)")
    add_overrides(parser)


def check(arguments: argparse.Namespace) -> int:
    """Check whether an evaluation can start. Training with `eval.watch=true` runs this first."""
    from eval_pipeline.config import TIERS
    from eval_pipeline.judge import JudgeClient
    from eval_pipeline.pool import assign_gpus, require_engine
    from eval_pipeline.problems.datasets import RUNS_CODE, is_local, load_problems
    from eval_pipeline.recipe import load_eval_config, selection_metric

    if arguments.watch:
        refuse_server(arguments.overrides, "watch")
    config = load_eval_config(arguments.recipe, arguments.overrides)
    require_engine(config)
    if arguments.watch:
        config.engine.require_own_model("watch")
    sources = [config.sources[name] for name, _ in config.datasets_up_to(max(TIERS))]
    if not sources:
        raise UserError("no tier of the recipe lists a dataset, so there is nothing to evaluate; set tiers.tier1")
    output_mb = config.judge.limits.output_mb
    counts: dict[str, int | None] = {}
    runs_code: dict[str, bool | None] = {}
    for source in sources:
        if is_local(source):
            problems = load_problems(source, output_mb)
            counts[source.name] = len(problems)
            runs_code[source.name] = any(problem.runs_code for problem in problems)
        else:
            counts[source.name] = None
            runs_code[source.name] = RUNS_CODE.get(source.format)
    selecting = [runs_code[name] for name in config.selected_on]
    is_known = any(selecting) or None not in selecting
    metric = selection_metric(config, any(selecting)) if is_known else config.selection.metric
    isolation: str | None = None
    num_gpus = 0
    is_local_pool = config.executor.kind == "local"
    if is_local_pool:  # a Ray cluster judges on its own machines
        with JudgeClient(replace(config.judge, num_workers=1)) as judge:
            isolation = judge.isolation
    if is_local_pool or config.executor.address == "local":  # a local Ray cluster uses this machine's GPUs
        groups = assign_gpus(config.executor.num_workers, config.engine)
        num_gpus = sum(len(group.split(",")) for group in groups if group is not None)
    if arguments.json:
        print_line(
            json.dumps({"problems": counts, "selection_metric": metric, "isolation": isolation, "gpus": num_gpus})
        )
        return 0
    shown = (f"{name} ({'from the Hub' if count is None else f'{count} problems'})" for name, count in counts.items())
    best = f"best checkpoint by {metric or 'exec_success_rate or accepted_at_1'} on {', '.join(config.selected_on)}"
    sandbox = "answers are judged on the Ray cluster" if isolation is None else f"isolation: {isolation}"
    print_line(f"The recipe is valid: {', '.join(shown)}; {best}; {sandbox}; GPUs on this machine: {num_gpus}")
    return 0
