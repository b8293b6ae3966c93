"""What the charts show of GRPO, of the budget controller and of evaluated checkpoints: the runs' own values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.helpers.commands import Run
from tests.helpers.monitor import browser, choose, monitor, open_tab, series, visit, wait_for_text
from tests.integration import test_budget_command as budget
from tests.integration import test_grpo_command as grpo
from tests.integration.test_budget_command import inputs  # noqa: F401 - a fixture
from verl_ext.metrics.jsonl import read_metrics

OF_GRPO = {
    "Rewards": {"train/reward_total_mean", "eval/reward_total_mean"},
    "Reward by function": {"train/exec_success_mean", "train/length_penalty_mean"},
    "Loss": {"train/loss"},
    "Advantages": {f"train/adv_{figure}" for figure in ("mean", "std", "min", "max")},
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
    "Training speed": {"throughput/train/configs_per_s"},
    "Entropy": {"train/entropy"},
}
RATES = ("accepted_at_1", "exec_success_rate")


@pytest.fixture(scope="module")
def root(quickstart: Path, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of each stage, made by its command."""
    root = tmp_path_factory.mktemp("monitored") / "checkpoints"
    grpo.run(quickstart, root / "project/grpo", "rollout.engine=hf")
    assert budget.run(inputs, root / "project/budget").returncode == 0
    few = root.parent / "few.yaml"
    few.write_text(
        f"datasets: {{few: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 4}}}}\n"
        "tiers: {tier1: [few]}\nsampling: {max_tokens: 16}\npoll_s: 0.5\nwandb: false\n"
    )
    watched = ("eval.watch=true", f"eval.recipe={few}", "trainer.max_ckpt_to_keep=9")
    assert Run(quickstart, root / "project/sft", *watched).start().returncode == 0
    return root


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser, root: Path, tmp_path: Path) -> Iterator[Page]:
    with monitor(root, tmp_path / "monitor.sqlite") as address, visit(chromium, address) as page:
        yield page


@pytest.mark.parametrize(("run", "charts"), [("grpo", OF_GRPO), ("budget", OF_THE_CONTROLLER)])
def test_each_chart_has_the_runs_own_values(page: Page, root: Path, run: str, charts: dict[str, set[str]]) -> None:
    choose(page, f"project/{run}")
    page.get_by_test_id("fold").get_by_text("Other charts").click()
    rows = read_metrics(root / "project" / run / "metrics.jsonl")
    for chart, wanted in charts.items():
        lines = {line["name"]: line for line in series(page, chart)}
        assert wanted <= set(lines), chart
        for name, line in lines.items():
            told = [(row["step"], row[name]) for row in rows if name in row]
            assert [place for place, _ in line["data"]] == [step for step, _ in told], name
            values = [value for _, value in line["data"]]
            assert values == pytest.approx([value for _, value in told], rel=1e-5, abs=1e-9), name


def test_the_share_over_budget_has_its_line(page: Page) -> None:
    choose(page, "project/budget")
    assert series(page, "Violation rate")[0]["marks"] == [0.05]


def test_evaluated_checkpoints_have_their_rates_with_intervals_and_the_best_is_marked(page: Page, root: Path) -> None:
    choose(page, "project/sft")
    open_tab(page, "Evaluation")
    wait_for_text(page, "dataset", "few")
    figures = {
        step: json.loads((root / f"project/sft/eval/eval_step_{step}/metrics.json").read_text())["datasets"]["few"]
        for step in (2, 4, 6)
    }
    best = json.loads((root / "project/sft/best_checkpoint.json").read_text())["step"]
    lines = series(page, "rates")
    for name in RATES:
        rate, *intervals = (line["data"] for line in lines if line["name"] == name)
        assert rate == [[step, figures[step][name]] for step in figures]
        assert intervals == [[[step, end] for end in figures[step]["intervals"][name]] for step in figures]
    assert lines[0]["marks"] == [best]
    shares = {line["name"]: line["data"] for line in series(page, "errors")}
    assert shares["success"] == [figures[step]["success_rate"] for step in figures]
    for place in range(len(figures)):
        assert sum(share[place] for share in shares.values()) == pytest.approx(1)
