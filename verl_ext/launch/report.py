"""Ends a launch: closes `run.json` and prints one message or a summary."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals

from verl_ext.checkpoint.manifest import EXPORT, has_export, read_complete, read_tracker, step_of
from verl_ext.commands import typed_command
from verl_ext.config.compose import load_yaml, override_of
from verl_ext.config.recipes import default_recipe
from verl_ext.console import print_line, print_next, print_summary, typed_path, warn
from verl_ext.errors import UserError
from verl_ext.launch.configure import resume_candidate
from verl_ext.launch.outcome import Failure, Outcome, Stopped
from verl_ext.metrics.jsonl import METRICS_FILE, iter_metrics
from verl_ext.metrics.run_record import EndStatus, RunRecord
from verl_ext.paths import RECIPES, base_directory
from verl_ext.trainer.stages import BudgetConfig, RunConfig

SUMMARY_METRICS = (
    "train/loss", "val/loss", "eval/reward_total_mean", "eval/accuracy_mean", "eval/budget_violation_mean",
)  # fmt: skip
"""Metrics whose first and last values are shown if the run has them."""
WRITTEN = (
    "config.yaml", "run.json", "metrics.jsonl", "*_history.csv", "train.log", "console.log", "events.jsonl",
    "samples.jsonl", "sample_tokens.jsonl", "trace/", "tensorboard/", "wandb/",
)  # fmt: skip
"""Files of a run directory besides checkpoints and evaluations; see docs/reference/run_directory.md."""


def report(outcome: Outcome, config: RunConfig, record: RunRecord | None) -> int:
    """Close `run.json` if the ranks could not, and tell the user how the launch ended; returns the exit code.

    Args:
        outcome: outcome of this node's ranks.
        record: record of the run; None on nodes other than the first, which writes it for all.

    Raises:
        UserError: a rank rejected its input. The caller closes `run.json`, as for errors of the launcher itself.
    """
    if isinstance(outcome, Stopped) and record is not None:
        outcome = unless_ended_before(outcome, record)
    if isinstance(outcome, Failure):
        if outcome.is_user_error:
            raise UserError(outcome.message)
        close(record, "failed", outcome.message, is_cause=outcome.exit_code < 0)
        print_line(f"error: {outcome.message}; {next_start(config)}", sys.stderr)
        return 1
    if isinstance(outcome, Stopped):
        report_stop(outcome, config, record)
        return outcome.exit_code
    if record is not None:
        print_run_summary(config)
    return 0


def unless_ended_before(stopped: Stopped, record: RunRecord) -> Outcome:
    """Return the outcome that rank 0 recorded: it may have finished, failed or saved before the ranks were killed."""
    run, request = record.read(), stopped.request
    if run["status"] == "finished":
        return None
    if run["status"] == "failed":
        return Failure(run["attempts"][-1]["exit_reason"], exit_code=1)
    if run["status"] == "stopped" and request is not None:
        return replace(stopped, request=replace(request, was_too_slow=False))
    return stopped


def report_stop(stopped: Stopped, config: RunConfig, record: RunRecord | None) -> None:
    """Tell the user what stopped the run and where it resumes."""
    request, last_step = stopped.request, None
    reason = stop_reason(stopped, config.trainer.preemption.grace_s)
    close(record, "stopped", reason)
    if record is not None:
        attempt = record.read()["attempts"][-1]
        last_step = attempt["last_step"]
        if request is None:
            reason = attempt["exit_reason"]  # rank 0 records which signal or rule it was
        elif last_step is not None and not request.was_too_slow:
            reason += f" after step {last_step}"
    if request is not None and request.was_too_slow:
        print_line(
            f"error: {reason}; {next_start(config)}. Raise trainer.preemption.grace_s to allow more time", sys.stderr
        )
    else:
        print_line(f"{reason[0].upper()}{reason[1:]}; {next_start(config, last_step)}.")


def close(record: RunRecord | None, status: EndStatus, reason: str, is_cause: bool = False) -> None:
    """Record how the run ended in `run.json` unless rank 0 has; a failure is only a warning.

    Args:
        record: record of the run, if this node writes it.
        status: how the run ended.
        reason: one sentence.
        is_cause: whether it replaces a failure that rank 0 recorded: that of another rank's death, as it saw it.
    """
    if record is not None:
        try:
            if not record.end_if_running(status, reason) and is_cause:
                record.replace_failure(reason)
        except UserError as error:
            warn(f"{error}")


def stop_reason(stopped: Stopped, grace_s: float) -> str:
    """Return why the ranks ended, for `run.json`."""
    request = stopped.request
    if stopped.elsewhere:
        return stopped.elsewhere
    if request is None:
        return "stopped by a signal to a rank"
    if request.was_too_slow:
        limit = f"trainer.preemption.grace_s={grace_s:g} s"
        return f"killed after {request.signal.name} because the step and the save took longer than {limit}"
    if request.immediate is not None:
        second = "a second " if request.immediate is Signals.SIGINT else ""
        return f"stopped immediately by {second}{request.immediate.name}"
    return f"stopped by {request.signal.name}"


def next_start(config: RunConfig, last_step: int | None = None) -> str:
    """Say, as a clause, where the same command resumes; `last_step` is the last completed step, if known."""
    try:
        checkpoint = resume_candidate(config)
    except UserError as error:
        return f"the same command cannot resume: {error}"
    if checkpoint is None:
        return "the same command starts at step 0"
    where = "there" if step_of(checkpoint) == last_step else checkpoint.name
    then = f", after writing the checkpoint's {EXPORT}/" if EXPORT in read_complete(checkpoint).deferred else ""
    return f"the same command resumes from {where}{then}"


# The summary of a finished run


def print_run_summary(config: RunConfig) -> None:
    """Print the summary of a finished run from its files.

    With `eval.watch=true` the next command depends on how the evaluation ends, so `EvalWatcher.finish` prints it.
    """
    run_dir = config.trainer.run_dir
    rows = metric_changes(run_dir / METRICS_FILE)
    rows["run directory"] = f"{typed_path(run_dir)}  ({', '.join(written(run_dir))})"
    # From the tracker: an earlier run in the same directory may have left checkpoints of higher steps.
    checkpoint, _ = read_tracker(run_dir)
    then: list[list[str]] = []
    if checkpoint is not None:
        rows["last checkpoint"] = typed_path(checkpoint)
        if has_export(checkpoint):
            rows["Hugging Face"] = typed_path(checkpoint / EXPORT)
            then = [] if config.eval.watch else next_commands(config)
        else:
            why = "this checkpoint was saved without an export"
            if "hf_model" not in config.trainer.checkpoint.save_contents:
                why = "trainer.checkpoint.save_contents lacks hf_model"
            rows["Hugging Face"] = f"no weights: {why}; the next command exports them"
            then = [[*typed_command("checkpoint"), "export", typed_path(checkpoint)]]
    print_summary(f"Finished: {config.trainer.experiment_name} ({config.stage})", rows)
    print_next(then)


def written(run_dir: Path) -> list[str]:
    """Return the entries of `WRITTEN` that exist in the run directory."""
    return [name for name in WRITTEN if any(run_dir.glob(name.rstrip("/")))]


def metric_changes(path: Path) -> dict[str, str]:
    """Return the first and last values of `SUMMARY_METRICS`, without rows that a later attempt replaced."""
    values: dict[str, dict[int, float]] = {name: {} for name in SUMMARY_METRICS}
    attempt = None
    for row in iter_metrics(path) if path.is_file() else ():
        if row["attempt"] != attempt:  # a later attempt replaces everything from its first row on
            attempt = row["attempt"]
            # a validation that a stop interrupted follows the last step of the earlier attempt
            first = row["step"] + (not any(name.startswith("train/") for name in row))
            values = {name: {s: v for s, v in old.items() if s < first} for name, old in values.items()}
        for name in values.keys() & row.keys():
            values[name][row["step"]] = row[name]
    return {
        name: f"{series[min(series)]:.4f} at step {min(series)} -> {series[max(series)]:.4f} at step {max(series)}"
        for name, series in values.items()
        if series
    }


# The next commands


def next_commands(config: RunConfig) -> list[list[str]]:
    """Return the commands to run after a finished run with an export: its evaluation, and the next stage."""
    run_dir = config.trainer.run_dir
    if config.stage == "vlm_sft":
        return [grpo_command(config) or grpo_with(config, "budget_controller")]
    if isinstance(config, BudgetConfig):
        checkpoint, _ = read_tracker(run_dir)
        assert checkpoint is not None  # it has the export
        adapter = [] if config.model.adapter is None else ["--adapter", config.model.adapter]
        export = typed_path(checkpoint / EXPORT)
        return [[*typed_command("eval"), "adaptive", "--checkpoint", export, *adapter]]
    # The default recipe's problems do not fit a run whose recipe names no evaluation.
    watch = [] if config.eval.recipe is None else with_recipe(config, "watch", typed_path(run_dir))
    return [watch, grpo_command(config)]


def next_after_evaluation(config: RunConfig) -> list[list[str]]:
    """Return the commands to run once `eval.watch=true` has evaluated every checkpoint of a finished run."""
    run_dir = typed_path(config.trainer.run_dir)
    base = Path(str(config.model.partial_pretrain)).expanduser()
    if not (base / "config.json").is_file():  # a Hub name, which `report` cannot evaluate
        return [[*typed_command("eval"), "status", run_dir], grpo_command(config)]
    return [with_recipe(config, "report", run_dir, "--baseline", typed_path(base)), grpo_command(config)]


def with_recipe(config: RunConfig, *words: str) -> list[str]:
    """Return an evaluation command, with the recipe file, because it does not trust the run's config.yaml."""
    recipe = config.eval.recipe or ""
    named = ["--recipe", typed_path(recipe)] if recipe.endswith((".yaml", ".yml")) else []
    return [*typed_command("eval"), *words, *named]


def grpo_command(config: RunConfig) -> list[str]:
    """Return the GRPO command with the recipe that builds on this run; empty if no recipe in `recipes/grpo/` does."""
    wanted = {"sft": "grpo", "vlm_sft": "budget"}.get(config.stage)
    recipes = {}
    for path in sorted((RECIPES / "grpo").glob("*.yaml")):
        with suppress(UserError):  # a malformed recipe must not fail a finished run
            recipes[path.stem] = load_yaml(path)
    recipes = {name: each for name, each in recipes.items() if each.get("stage", "grpo") == wanted}
    run_dir = config.trainer.run_dir.resolve()
    for name, recipe in recipes.items():
        if (base_directory() / (recipe.get("model", {}).get("sft_run") or "")).resolve() == run_dir:
            return grpo_with(config, name, names_run=False)
    return grpo_with(config, config.recipe) if config.recipe is not None and config.recipe in recipes else []


def grpo_with(config: RunConfig, recipe: str, *, names_run: bool = True) -> list[str]:
    """Return the GRPO command with a recipe, on the same number of ranks."""
    words = [*typed_command("grpo"), str(config.trainer.n_gpus_per_node)]
    words += [f"recipe={recipe}"] * (recipe != default_recipe("grpo"))
    return words + [override_of("model.sft_run", typed_path(config.trainer.run_dir))] * names_run
