"""Metric names, timers, reduction over ranks, and console output."""

import math
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_ext.distributed import reduce_over_ranks
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.registry import METRICS, lookup_metric
from verl_ext.metrics.sinks import ConsoleSink, ProgressBar
from verl_ext.metrics.timing import StepTimer

ROOT = Path(__file__).parents[2]


def check_reduction_on_one_of_two_ranks(rank, address_file):
    dist.init_process_group("gloo", init_method=f"file://{address_file}", rank=rank, world_size=2)
    sums = {"loss": 0.1, "tokens": 2**53 - 2} if rank == 0 else {"tokens": 1, "loss": 0.2}
    reduced = reduce_over_ranks(sums=sums, maxima={"time": float(rank), "norm": math.nan if rank == 0 else 5.0})
    assert reduced["loss"] == 0.1 + 0.2 and reduced["tokens"] == 2**53 - 1
    assert reduced["time"] == 1.0 and math.isnan(reduced["norm"])
    dist.destroy_process_group()


def test_reduction_is_float64_and_independent_of_name_order(tmp_path):
    mp.spawn(check_reduction_on_one_of_two_ranks, (str(tmp_path / "address"),), nprocs=2)


def test_reduction_on_one_rank_returns_its_values():
    assert reduce_over_ranks(sums={"a": 1}, maxima={"b": -2.0}) == {"a": 1.0, "b": -2.0}
    assert math.isnan(reduce_over_ranks(maxima={"b": math.nan})["b"])
    assert reduce_over_ranks() == {}
    with pytest.raises(AssertionError):
        reduce_over_ranks(sums={"a": 1}, maxima={"a": 1})


def test_timer_accumulates_parts_until_popped(monkeypatch):
    timer, clock = StepTimer(), iter([10.0, 11.0, 20.0, 22.0, 30.0, 34.0])
    monkeypatch.setattr(timer, "_now", lambda: next(clock))
    for _ in range(2):
        with timer.measure("data"):
            pass
    with pytest.raises(ValueError), timer.measure("save"):
        raise ValueError
    assert timer.pop() == {"data": 3.0, "save": 4.0}
    assert timer.pop() == {}


def test_metrics_are_described_and_unknown_ones_rejected():
    assert all(metric.unit and metric.meaning.endswith(".") and metric.reduction for metric in METRICS.values())
    assert lookup_metric("train/lr(1e-3)").unit == "1e-3"
    assert lookup_metric("eval/humaneval/timeout_rate") is METRICS["eval/<dataset>/timeout_rate"]
    assert lookup_metric("eval/humaneval/pass_at_10") is METRICS["eval/<dataset>/pass_at_<k>"]
    assert lookup_metric("eval/humaneval/pass_at_10_low") is METRICS["eval/<dataset>/<rate>_low"]
    with pytest.raises(UserError, match="train/loss"):
        lookup_metric("train/los")


def test_console_prints_every_log_every_steps(capsys):
    lines = ConsoleSink(total_steps=25, log_every=10)
    metrics = {"train/loss": 1.23456, "train/lr(1e-3)": 0.02, "throughput/train/tokens_per_s": 12345.6}
    for step in range(1, 26):
        lines.log_row(MetricsRow(step, 1, 100.0 + 2 * step, metrics))
    lines.log_row(MetricsRow(25, 1, 160.0, {"val/loss": 1.5, "time/val/step_s": 8.0}))
    assert capsys.readouterr().out.splitlines() == [
        "step 10/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:30",
        "step 20/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:10",
        "step 25/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:00",
        "step 25/25 | val loss 1.5000 | 8.0 s",
    ]


def test_step_without_loss_tokens_is_printed() -> None:
    metrics = {"train/lr(1e-3)": 0.02, "train/num_loss_tokens": 0.0, "time/train/step_s": 1.0}
    assert shown(MetricsRow(3, 1, 0.0, metrics)) == ["step 3/2000 | no token to train on | lr 2.00e-05"]
    metrics = {"train/samples_without_reward": 4.0, "train/lr(1e-3)": 0.02}
    assert shown(MetricsRow(3, 1, 0.0, metrics)) == ["step 3/2000 | no reward to train on | lr 2.00e-05"]


GRPO_ROW = {
    "train/loss": -0.0105, "train/reward_total_mean": -0.4, "train/seq_completion_len_mean": 1234.4,
    "train/update_kl": -0.0, "train/lr(1e-3)": 0.02, "train/grad_norm": 1.363,
    "throughput/train/valid_tokens_per_s": 123.4, "train/entropy": 0.1, "train/near_mean": 0.1,
}  # fmt: skip
BUDGET_ROW = {
    "train/loss": -0.0105, "train/reward_total_mean": -0.4, "train/accuracy_mean": 0.5,
    "train/latency_ms_mean": 212.53, "train/update_kl": 0.0, "train/lr(1e-3)": 0.02, "train/grad_norm": 1.363,
}  # fmt: skip


def shown(*rows: MetricsRow, total_steps: int = 2000) -> list[str]:
    lines: list[str] = []
    console = ConsoleSink(total_steps=total_steps, log_every=1, show=lines.append)
    for row in rows:
        console.log_row(row)
    return lines


@pytest.mark.parametrize(
    ("metrics", "middle", "step", "total_steps", "step_s", "eta"),
    [
        (GRPO_ROW, "length 1234", 1000, 2000, 114.0, "31:40:00"),
        ({**GRPO_ROW, "train/update_kl": 0.0123}, "length 1234 | step KL 0.0123", 100, 200, 4.0, "0:06:40"),
        ({**GRPO_ROW, "train/kl": 0.0123}, "length 1234 | KL 0.0123", 1000, 2000, 114.0, "31:40:00"),
        (BUDGET_ROW, "acc 0.500 | latency 212.5 ms", 100, 200, 60.0, "1:40:00"),
    ],
    ids=["grpo", "several updates", "with a reference model", "budget"],
)
def test_reward_lines_show_parts_and_fit_terminal(
    metrics: dict[str, float], middle: str, step: int, total_steps: int, step_s: float, eta: str
) -> None:
    rows = MetricsRow(step - 1, 1, 0.0, metrics), MetricsRow(step, 1, step_s, metrics)
    *_, line = shown(*rows, total_steps=total_steps)
    parts = f"loss -0.0105 | reward -0.400 | {middle} | lr 2.00e-05 | grad norm 1.363"
    assert line == f"step {step}/{total_steps} | {parts} | ETA {eta}" and len(line) <= 120


def test_reward_measurement_gets_separate_line() -> None:
    measured = {
        "eval/reward_total_mean": 0.4, "eval/reward_total_std": 0.1, "eval/near_mean": 0.1, "eval/short_mean": 0.3,
        "eval/seq_completion_len_mean": 53.2, "eval/seq_prompt_len_mean": 9.0, "time/eval/step_s": 12.34,
    }  # fmt: skip
    assert shown(MetricsRow(0, 1, 0.0, measured)) == [
        "step 0/2000 | eval reward 0.400 | near 0.100 | short 0.300 | length 53 | 12.3 s"
    ]
    many = {f"eval/a_rather_long_name_{number}_mean": 0.5 for number in range(9)}
    [line] = shown(MetricsRow(1000, 1, 0.0, {**measured, **many}))
    assert 100 < len(line) <= 120 and line.endswith("length 53 | 12.3 s")
    [alone] = shown(MetricsRow(1000, 1, 0.0, {"eval/reward_total_mean": 0.4, "eval/near_mean": 0.4}))
    assert alone == "step 1000/2000 | eval reward 0.400"
    of_controller = {"eval/accuracy_mean": 0.5, "eval/latency_ms_mean": 212.53, "eval/budget_violation_mean": 0.031}
    [line] = shown(MetricsRow(8, 1, 0.0, {"eval/reward_total_mean": 0.4, **of_controller, "eval/tier_mean": 1.0}))
    assert line == "step 8/2000 | eval reward 0.400 | acc 0.500 | latency 212.5 ms | over budget 3.1%"


def test_progress_bar_is_drawn_only_on_terminal(capsys, monkeypatch):
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        bar = ProgressBar(total_steps=10, initial=4)
        bar.update({"train/loss": 1.5, "train/latency_ms_mean": 31.25})
        bar.close()
        shown = capsys.readouterr().err
        assert ("5/10" in shown and "loss=1.5000, ms=31.2" in shown) if is_terminal else shown == ""
