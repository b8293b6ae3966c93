"""Every tab shows what is in the files of a run of each stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.helpers.commands import GRPORun, RecipeRun, SFTRun
from tests.helpers.monitor import choose, copy_run, monitor, open_tab, series, text, until_passes, visit, wait_for_text
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
LAST_STEPS = {"grpo": 4, "budget": 8, "sft": 6}


@pytest.fixture(scope="module")
def root(
    grpo_run: GRPORun, budget_run: RecipeRun, watched_run: SFTRun, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of each stage with a checkpoint; step 6 of the SFT run solves one more problem than step 2."""
    root = tmp_path_factory.mktemp("monitored") / "checkpoints"
    for name, run in {"grpo": grpo_run, "budget": budget_run, "sft": watched_run}.items():
        copy_run(run.run_dir, root / "project" / name, LAST_STEPS[name])
    for step, error in ((2, "wrong_answer"), (6, "success")):
        path = root / f"project/sft/eval/eval_step_{step}/verdicts/few.jsonl"
        first, *others = read_lines(path)
        path.write_text("".join(json.dumps(row) + "\n" for row in (first | {"error_type": error}, *others)))
    return root


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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


@pytest.mark.parametrize("run", LAST_STEPS)
def test_tabs_show_record_checkpoints_health_and_console(page: Page, root: Path, run: str) -> None:
    run_dir = root / "project" / run
    [attempt] = json.loads((run_dir / "run.json").read_text())["attempts"]
    choose(page, f"project/{run}")
    open_tab(page, "Configuration")
    wait_for_text(page, "command", attempt["command"])
    wait_for_text(page, "packages", attempt["packages"]["torch"])
    wait_for_text(page, "settings", "data.train_batch_size")
    open_tab(page, "Checkpoints")
    wait_for_text(page, "checkpoints", f"global_step_{LAST_STEPS[run]}")
    open_tab(page, "Health")
    wait_for_text(page, "health", "all steps completed")
    open_tab(page, "Log")
    wait_for_text(page, "log", f"attempt 1 ended: {attempt['exit_reason']}")
    page.get_by_test_id("log source").get_by_text("Console").click()
    wait_for_text(page, "log", f"rank 0: step {LAST_STEPS[run]}/{LAST_STEPS[run]} | ")


@pytest.mark.parametrize(
    ("run", "file"),
    [("sft", "eval/*/qa_logs/few_qa.jsonl"), ("grpo", "samples.jsonl"), ("budget", "samples.jsonl")],
)
def test_samples_can_be_read_in_full(page: Page, root: Path, run: str, file: str) -> None:
    rows = [row for path in (root / "project" / run).glob(file) for row in read_lines(path)]
    choose(page, f"project/{run}")
    open_tab(page, "Samples")
    open_first(page, "sample", "prompt")
    shown = words(text(page, "sample"))
    assert any(words(row["prompt"]) in shown and words(row["answer"]) in shown for row in rows)


def open_first(page: Page, name: str, wanted: str) -> None:
    """Click the first row of the samples until an element has a text; a click is lost if the table moves meanwhile."""

    def click() -> None:
        page.get_by_test_id("samples").locator("tbody tr").first.click()
        expect(page.get_by_test_id(name).first).to_contain_text(wanted, use_inner_text=True)

    until_passes(click)


def words(text: str) -> str:
    return " ".join(text.split())


def test_completions_are_shown_side_by_side_and_token_by_token(page: Page, root: Path) -> None:
    rows = [row for row in read_lines(root / "project/grpo/samples.jsonl") if row["split"] == "train"]
    choose(page, "project/grpo")
    open_tab(page, "Samples")
    page.get_by_test_id("sample split").click()
    page.get_by_role("option", name="train").click()
    expect(page.get_by_test_id("samples").locator("tbody tr").first).to_contain_text("train")
    open_first(page, "tokens", rows[-1]["answer"].split()[0])
    colored = page.get_by_test_id("tokens").locator("[style*=background]")
    until_passes(lambda: at_least(colored.count(), 1))
    page.get_by_test_id("token colors").get_by_text("Loss mask").click()
    tokens = read_lines(root / "project/grpo/sample_tokens.jsonl")
    until_passes(lambda: at_least(colored.count(), min(sum(row["loss_mask"]) for row in tokens)))
    page.get_by_test_id("sample groups").click()
    open_first(page, "group", "step")
    members = {row["sample_id"]: sum(other["sample_id"] == row["sample_id"] for other in rows) for row in rows}
    assert page.get_by_test_id("group").locator(".q-card").count() in members.values()


def at_least(count: int, wanted: int) -> None:
    assert count >= wanted


def test_flipped_problem_shows_both_answers(page: Page, root: Path) -> None:
    evaluations = [root / f"project/sft/eval/eval_step_{step}" for step in (2, 6)]
    before, after = ({row["problem_id"]: row for row in read_lines(each / "answers/few.jsonl")} for each in evaluations)
    choose(page, "project/sft")
    open_tab(page, "Evaluation")
    for model, step in (("a", 2), ("b", 6)):
        page.get_by_test_id(f"flips {model}").click()
        page.get_by_role("option").filter(has_text=f"step {step}").first.click()
    wait_for_text(page, "flips Gained", "1")
    wait_for_text(page, "flips p", "p = 1 (McNemar's exact test)")
    problem = read_lines(evaluations[0] / "verdicts/few.jsonl")[0]["problem_id"]

    def open_problem() -> None:
        page.get_by_test_id("flips").get_by_role("link", name=problem).click()
        expect(page.get_by_test_id("answer A")).to_be_visible()

    until_passes(open_problem)
    for letter, answers in (("A", before), ("B", after)):
        wait_for_text(page, f"answer {letter}", "tests passed")
        assert words(answers[problem]["answer"]) in words(text(page, f"answer {letter}"))
