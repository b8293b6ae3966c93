"""Campaign: judges that are killed, and bad input that unit tests cover."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import GRPORun, RecipeRun, end_of
from tests.helpers.judge import killing_judges


@pytest.mark.parametrize("seed", range(4))
def test_killed_judges_change_no_metric(seed: int, grpo_run: GRPORun, quickstart: Path, tmp_path: Path) -> None:
    """No sample loses its reward, and all metrics equal those of an undisturbed run."""
    run = GRPORun(quickstart, tmp_path / "run")
    with run.started() as process, killing_judges(process, seed) as killed:
        result = end_of(process)
    assert result.returncode == 0 and killed, result.stderr
    kinds = ("train/loss", "train/grad_norm", "train/reward", "train/adv", "eval/reward", "train/samples")
    expected, found = (
        [{name: value for name, value in row.items() if name.startswith(kinds)} for row in each.rows()]
        for each in (grpo_run, run)
    )
    # the row of a save is written when it completes
    expected, found = ([row for row in rows if row] for rows in (expected, found))
    assert found == expected and not any(row.get("train/samples_without_reward") for row in found)


def assert_refused(done: subprocess.CompletedProcess[str], *fragments: str) -> None:
    """Assert that a command ended with exit code 2 and one error message with these facts."""
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in printed, printed
    [error] = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert all(fragment in error for fragment in fragments), error


@pytest.mark.parametrize("override", ["rollout.n=1", "data.max_prompt_length=3"])
def test_grpo_rejects_bad_input(override: str, quickstart: Path, tmp_path: Path) -> None:
    assert_refused(GRPORun(quickstart, tmp_path / "run", override).start(), override.partition("=")[0])


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("controller.topk_choices=[1,2]", ("controller.topk_choices", "4")),
        ("controller.importance_file={other}/importance.json", ("{other}/importance.json",)),
        ("controller.init_from={inputs}/latency.json", ("controller.init_from", "{inputs}/latency.json")),
        ("data.train_batch_size=50", ("data.train_batch_size", "8 questions")),
    ],
)
def test_budget_rejects_bad_input(
    override: str, fragments: tuple[str, ...], budget_inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "importance.json").write_text(json.dumps({str(block): 1.0 for block in range(1, 9)}))
    places = {"inputs": budget_inputs, "other": tmp_path}
    run = RecipeRun("run_grpo.sh", budget_inputs / "recipe.yaml", tmp_path / "run", override.format(**places))
    assert_refused(run.start(), *(fragment.format(**places) for fragment in fragments))
