"""Charts of GRPO, of the budget controller and of evaluated checkpoints show the values of the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.commands import GRPORun, RecipeRun, SFTRun
from tests.helpers.monitor import choose, copy_run, monitor, open_tab, series, until_passes, visit, wait_for_text
from verl_ext.metrics.jsonl import read_metrics

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OF_GRPO = {
    "Rewards": {"train/reward_total_mean", "eval/reward_total_mean"},
    "Reward by function": {"train/exec_success_mean", "train/length_penalty_mean"},
    "Loss": {"train/loss"},
    "Advantages": {f"train/adv_{statistic}" for statistic in ("mean", "std", "min", "max")},
    "Entropy": {"train/entropy"},
    "Completion and prompt length": {"train/seq_completion_len_mean", "train/seq_prompt_len_mean"},
    "Engine against trainer": {"train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max"},
    "Time by part": {f"time/train/{part}_s" for part in ("step", "rollout", "reward", "advantages", "shard", "update")},
    "Gradient norm": {"train/grad_norm"},
}
OF_THE_CONTROLLER = {
    "Rewards": {"train/reward_total_mean", "eval/reward_total_mean"},
    "Reward by function": {
        f"train/reward_{part}_mean" for part in ("accuracy", "latency", "violation", "complexity", "efficiency")
    },
    "Accuracy": {"train/accuracy_mean", "eval/accuracy_mean"},
    "Latency and budget": {"train/latency_ms_mean", "eval/latency_ms_mean", "train/budget_ms_mean"},
    "Violation rate": {"train/budget_violation_mean", "eval/budget_violation_mean"},
    "Training speed": {"throughput/train/samples_per_s"},
    "Entropy": {"train/entropy"},
}
RATES = ("accepted_at_1", "exec_success_rate")


@pytest.fixture(scope="module")
def root(
    grpo_run: GRPORun, budget_run: RecipeRun, watched_run: SFTRun, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of each stage."""
    root = tmp_path_factory.mktemp("monitored") / "checkpoints"
    for name, run in {"grpo": grpo_run, "budget": budget_run, "sft": watched_run}.items():
        copy_run(run.run_dir, root / "project" / name)
    return root


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with monitor(root, tmp_path_factory.mktemp("database") / "monitor.sqlite") as address:
        yield address


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    with visit(chromium, address) as page:
        yield page


@pytest.mark.parametrize(("run", "charts"), [("grpo", OF_GRPO), ("budget", OF_THE_CONTROLLER)])
def test_charts_show_values_of_run(page: Page, root: Path, run: str, charts: dict[str, set[str]]) -> None:
    choose(page, f"project/{run}")
    page.get_by_test_id("fold").get_by_text("Other charts").click()
    rows = read_metrics(root / "project" / run / "metrics.jsonl")

    def assert_values(chart: str) -> None:
        lines = {line["name"]: line for line in series(page, chart)}
        assert charts[chart] <= set(lines), chart
        for name, line in lines.items():
            logged = [(row["step"], row[name]) for row in rows if name in row]
            assert [place for place, _ in line["data"]] == [step for step, _ in logged], name
            values = [value for _, value in line["data"]]
            assert values == pytest.approx([value for _, value in logged], rel=1e-5, abs=1e-9), name

    for chart in charts:
        until_passes(lambda chart=chart: assert_values(chart))


def test_violation_rate_chart_marks_limit(page: Page) -> None:
    choose(page, "project/budget")

    def assert_line() -> None:
        assert series(page, "Violation rate")[0]["marks"] == [0.05]

    until_passes(assert_line)


def test_evaluation_rates_have_intervals_and_best_is_marked(page: Page, root: Path) -> None:
    choose(page, "project/sft")
    open_tab(page, "Evaluation")
    wait_for_text(page, "dataset", "few")
    metrics = {
        step: json.loads((root / f"project/sft/eval/eval_step_{step}/metrics.json").read_text())["datasets"]["few"]
        for step in (2, 4, 6)
    }
    best = json.loads((root / "project/sft/best_checkpoint.json").read_text())["step"]

    def assert_rates() -> None:
        lines = series(page, "rates")
        for name in RATES:
            rate, band = (line["data"] for line in lines if line["name"] == name)
            assert rate == [[step, metrics[step][name]] for step in metrics]
            low, high = ([[step, metrics[step]["intervals"][name][end]] for step in metrics] for end in (0, 1))
            assert band == high + low[::-1]
        assert lines[0]["marks"] == [best]

    def assert_shares() -> None:
        shares = {line["name"]: line["data"] for line in series(page, "errors")}
        assert shares["success"] == [metrics[step]["success_rate"] for step in metrics]
        for place in range(len(metrics)):
            assert sum(share[place] for share in shares.values()) == pytest.approx(1)

    until_passes(assert_rates)
    until_passes(assert_shares)
    page.get_by_test_id("rates").click()
    page.get_by_role("option").filter(has_text="timeout_rate").click()

    def assert_chosen() -> None:
        lines = {line["name"]: line["data"] for line in series(page, "rates")[:3]}
        assert lines["timeout_rate"] == [[step, metrics[step]["timeout_rate"]] for step in metrics]

    until_passes(assert_chosen)
