"""Names, timers, reduction over ranks, and what the console shows."""

import math
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_ext.errors import UserError
from verl_ext.metrics.console import ConsoleLines, ProgressBar
from verl_ext.metrics.names import METRICS, describe
from verl_ext.metrics.reduce import reduce_over_ranks
from verl_ext.metrics.row import Row
from verl_ext.metrics.timers import StepTimer

ROOT = Path(__file__).parents[2]


def check_reduction_on_one_of_two_ranks(rank, address_file):
    dist.init_process_group("gloo", init_method=f"file://{address_file}", rank=rank, world_size=2)
    sums = {"loss": 0.1, "tokens": 2**53 - 2} if rank == 0 else {"tokens": 1, "loss": 0.2}
    reduced = reduce_over_ranks(sums=sums, maxima={"time": float(rank), "norm": math.nan if rank == 0 else 5.0})
    assert reduced["loss"] == 0.1 + 0.2 and reduced["tokens"] == 2**53 - 1
    assert reduced["time"] == 1.0 and math.isnan(reduced["norm"])
    dist.destroy_process_group()


def test_two_ranks_agree_in_float64_whatever_the_order_of_names(tmp_path):
    mp.spawn(check_reduction_on_one_of_two_ranks, (str(tmp_path / "address"),), nprocs=2)


def test_a_world_of_one_gets_its_own_values():
    assert reduce_over_ranks(sums={"a": 1}, maxima={"b": -2.0}) == {"a": 1.0, "b": -2.0}
    assert math.isnan(reduce_over_ranks(maxima={"b": math.nan})["b"])
    assert reduce_over_ranks() == {}
    with pytest.raises(UserError, match="a"):
        reduce_over_ranks(sums={"a": 1}, maxima={"a": 1})


def test_a_timer_adds_up_parts_until_popped(monkeypatch):
    timer, clock = StepTimer(), iter([10.0, 11.0, 20.0, 22.0, 30.0, 34.0])
    monkeypatch.setattr(timer, "_now", lambda: next(clock))
    for _ in range(2):
        with timer.measure("data"):
            pass
    with pytest.raises(ValueError), timer.measure("save"):
        raise ValueError
    assert timer.pop() == {"data": 3.0, "save": 4.0}
    assert timer.pop() == {}


def test_every_metric_is_described_and_an_unknown_one_is_refused():
    assert all(metric.unit and metric.meaning.endswith(".") and metric.reduction for metric in METRICS.values())
    assert describe("train/lr(1e-3)").unit == "1e-3"
    assert describe("eval/humaneval/timeout_rate") is METRICS["eval/<dataset>/timeout_rate"]
    assert describe("eval/humaneval/pass_at_10") is METRICS["eval/<dataset>/pass_at_<k>"]
    assert describe("eval/humaneval/pass_at_10_low") is METRICS["eval/<dataset>/<rate>_low"]
    with pytest.raises(UserError, match="train/loss"):
        describe("train/los")


def test_console_lines_at_their_turn(capsys):
    lines = ConsoleLines(total_steps=25, log_every=10)
    metrics = {"train/loss": 1.23456, "train/lr(1e-3)": 0.02, "throughput/train/tokens_per_s": 12345.6}
    for step in range(1, 26):
        lines.write(Row(step, 1, 100.0 + 2 * step, metrics))
    lines.write(Row(25, 1, 160.0, {"val/loss": 1.5, "time/val/step_s": 8.0}))
    assert capsys.readouterr().out.splitlines() == [
        "step 10/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:30",
        "step 20/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:10",
        "step 25/25 | loss 1.2346 | lr 2.00e-05 | 12,346 tokens/s | ETA 0:00:00",
        "step 25/25 | val loss 1.5000 | 8.0 s",
    ]
    with pytest.raises(UserError, match="at least 1"):
        ConsoleLines(total_steps=1, log_every=0)


def test_a_progress_bar_is_drawn_only_on_a_terminal(capsys, monkeypatch):
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        bar = ProgressBar(total_steps=10, initial=4)
        bar.update({"train/loss": 1.5})
        bar.close()
        shown = capsys.readouterr().err
        assert ("5/10" in shown and "loss=1.5000" in shown) if is_terminal else shown == ""
