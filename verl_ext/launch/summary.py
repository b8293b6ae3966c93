"""What the launcher prints of a finished run: what was learnt, where everything is, what to run next."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from verl_ext.checkpoint.layout import EXPORT, read_tracker
from verl_ext.commands import typed_command
from verl_ext.config.compose import load_yaml
from verl_ext.config.recipes import default_recipe
from verl_ext.console import print_next, print_summary, typed_path
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE, iterate_metrics
from verl_ext.paths import RECIPES, base_directory
from verl_ext.trainer.stages import BudgetConfig, RunConfig

LEARNT = ("train/loss", "val/loss", "eval/reward_total_mean", "eval/accuracy_mean", "eval/budget_violation_mean")
"""Metrics whose first and last values are shown, where a run has them."""
WRITTEN = (
    "config.yaml", "run.json", "metrics.jsonl", "*_history.csv", "train.log", "events.jsonl", "samples.jsonl", "trace/",
    "tensorboard/", "wandb/",
)  # fmt: skip
"""What a run directory can hold besides checkpoints and evaluations; docs/sft.md describes each."""


def print_run_summary(config: RunConfig) -> None:
    """Print the summary of a finished run from its files.

    With `eval.watch=true` the next command depends on how the evaluation ends: `print_next` prints it then.
    """
    run_dir = Path(config.trainer.default_local_dir)
    rows = learnt(run_dir / METRICS_FILE)
    rows["run directory"] = f"{typed_path(run_dir)}  ({', '.join(written(run_dir))})"
    # by the tracker: a former run of the same directory may have left checkpoints of higher steps
    checkpoint, _ = read_tracker(run_dir)
    then: list[list[str]] = []
    if checkpoint is not None:
        rows["last checkpoint"] = typed_path(checkpoint)
        if any((checkpoint / EXPORT).glob("*.safetensors")):
            rows["Hugging Face"] = typed_path(checkpoint / EXPORT)
            then = [] if config.eval.watch else next_commands(config)
        else:
            rows["Hugging Face"] = f"no weights: {why_no_weights(config)}; the next command exports them"
            then = [[*typed_command("checkpoint"), "export", typed_path(checkpoint)]]
    print_summary(f"Finished: {config.trainer.experiment_name} ({config.stage})", rows)
    print_next(then)


def why_no_weights(config: RunConfig) -> str:
    """Why the last checkpoint of a finished run has no export."""
    if "hf_model" not in config.trainer.checkpoint.save_contents:
        return "trainer.checkpoint.save_contents lacks hf_model"
    return "this checkpoint was saved without an export"


def written(run_dir: Path) -> list[str]:
    """Which of `WRITTEN` the run directory holds."""
    return [name for name in WRITTEN if any(run_dir.glob(name.rstrip("/")))]


def next_commands(config: RunConfig) -> list[list[str]]:
    """The commands to run after a finished run with an export: its evaluation, and the stage that builds on it."""
    if config.stage == "vlm_sft":
        return [grpo_command(config) or grpo_with(config, "budget_controller")]
    run_dir = Path(config.trainer.default_local_dir)
    if isinstance(config, BudgetConfig):
        checkpoint, _ = read_tracker(run_dir)
        assert checkpoint is not None  # it holds the export
        adapter = [] if config.model.adapter is None else ["--adapter", config.model.adapter]
        export = typed_path(checkpoint / EXPORT)
        return [[*typed_command("eval"), "adaptive", "--checkpoint", export, *adapter]]
    # without a recipe of its own the run would be asked the default recipe's problems, whatever it was trained on
    watch = [] if config.eval.recipe is None else with_recipe(config, "watch", typed_path(run_dir))
    return [watch, grpo_command(config)]


def next_after_evaluation(config: RunConfig) -> list[list[str]]:
    """The commands to run once `eval.watch=true` has evaluated every checkpoint of a finished run."""
    run_dir = typed_path(config.trainer.default_local_dir)
    base = Path(str(config.model.partial_pretrain)).expanduser()
    if not (base / "config.json").is_file():  # a hub name, which the report cannot evaluate
        return [[*typed_command("eval"), "status", run_dir], grpo_command(config)]
    return [with_recipe(config, "report", run_dir, "--baseline", typed_path(base)), grpo_command(config)]


def with_recipe(config: RunConfig, *words: str) -> list[str]:
    """A command of the evaluation; a recipe file must be named again, as a run's own `config.yaml` is not trusted."""
    recipe = config.eval.recipe or ""
    named = ["--recipe", typed_path(recipe)] if recipe.endswith((".yaml", ".yml")) else []
    return [*typed_command("eval"), *words, *named]


def grpo_command(config: RunConfig) -> list[str]:
    """GRPO with the recipe that builds on this run; empty where none of `recipes/grpo/` does."""
    wanted = {"sft": "grpo", "vlm_sft": "budget"}.get(config.stage)
    recipes = {}
    for path in sorted((RECIPES / "grpo").glob("*.yaml")):
        with suppress(UserError):  # a malformed recipe is no reason to fail a finished run
            recipes[path.stem] = load_yaml(path)
    recipes = {name: each for name, each in recipes.items() if each.get("stage", "grpo") == wanted}
    run_dir = Path(config.trainer.default_local_dir).resolve()
    for name, recipe in recipes.items():
        if (base_directory() / (recipe.get("model", {}).get("sft_run") or "")).resolve() == run_dir:
            return grpo_with(config, name, names_run=False)
    return grpo_with(config, config.recipe) if config.recipe is not None and config.recipe in recipes else []


def grpo_with(config: RunConfig, recipe: str, *, names_run: bool = True) -> list[str]:
    """GRPO with a recipe, on as many ranks as this run."""
    words = [*typed_command("grpo"), str(config.trainer.n_gpus_per_node)]
    words += [f"recipe={recipe}"] * (recipe != default_recipe("grpo"))
    return words + [f"model.sft_run={typed_path(config.trainer.default_local_dir)}"] * names_run


def learnt(path: Path) -> dict[str, str]:
    """First and last value of `LEARNT` on the way to the last step, without rows that a later attempt overtook."""
    values: dict[str, dict[int, float]] = {name: {} for name in LEARNT}
    attempt = None
    for row in iterate_metrics(path) if path.is_file() else ():
        if row["attempt"] != attempt:  # a later attempt replaces all from its first row on
            attempt = row["attempt"]
            values = {name: {s: v for s, v in old.items() if s < row["step"]} for name, old in values.items()}
        for name in values.keys() & row.keys():
            values[name][row["step"]] = row[name]
    return {name: describe_change(series) for name, series in values.items() if series}


def describe_change(series: dict[int, float]) -> str:
    """The first and the last of the values by step."""
    first, last = min(series), max(series)
    return f"{series[first]:.4f} at step {first} -> {series[last]:.4f} at step {last}"
