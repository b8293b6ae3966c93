"""The input of health rules: series, epochs, trends, the schedule, and rows without repeated steps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_ext.config.schema import as_dict
from verl_ext.health.context import schedule_of
from verl_ext.health.history import (
    MAX_FIRST,
    MAX_RECENT,
    MAX_SEGMENTS,
    SEGMENT_VALUES,
    MetricHistory,
    MetricSeries,
    columns_of,
    effective_rows,
    read_history,
)
from verl_ext.health.trend import noise, trend
from verl_ext.trainer.config import OptimConfig, Schedule
from verl_ext.trainer.optimizer import build_scheduler
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, SFTConfig


@pytest.mark.parametrize("at_once", [7, 4096, 100_000])
def test_series_keeps_ends_and_means_in_bounded_memory(at_once: int) -> None:
    series, values = MetricSeries(), np.arange(100_000, dtype=float)
    for start in range(0, len(values), at_once):
        part = values[start : start + at_once]
        series.add(start + 1 + np.arange(len(part)), part)
    assert series.first.tolist() == values[:MAX_FIRST].tolist()
    assert series.recent().tolist() == values[-MAX_RECENT:].tolist() and series.recent(3).tolist() == [*values[-3:]]
    assert series.points(2) == [(99_999, 99_998.0), (100_000, 99_999.0)]
    assert (series.last_value, series.num_points) == (99_999.0, 100_000)
    segments = series.segment_means
    assert MAX_SEGMENTS // 2 <= len(segments) < MAX_SEGMENTS
    size = int(segments[1] - segments[0])
    assert size % SEGMENT_VALUES == 0 and np.allclose(
        segments, values[: size * len(segments)].reshape(-1, size).mean(1)
    )


def test_huge_values_count_as_infinite() -> None:
    values = [1e302, -1.7e308, 1e31, 1e29, math.nan]
    _, found = columns_of([{"a": value} for value in values])["a"]
    assert found.tolist()[:4] == [math.inf, -math.inf, math.inf, 1e29] and math.isnan(found[4])
    _, found = columns_of([{"a": "text"}, {"a": 1e302}])["a"]
    assert found.tolist() == [math.inf]


def test_epoch_values_are_means_of_complete_epochs() -> None:
    history = MetricHistory()
    for step in range(1, 8):  # three steps an epoch
        history.add(step, {"train/loss": float(step), "train/epoch": step / 3})
        history.add(step, {"val/loss": 1.0})
    assert history.epochs("train/loss").tolist() == [2.0, 5.0]
    assert history.epochs("val/loss").tolist() == [] and history.series("val/loss").num_points == 7
    assert history.epochs("nothing").tolist() == [] and math.isnan(history.series("nothing").last_value)


@pytest.mark.parametrize("at_once", [1, 2, 5, 1000])
def test_epoch_means_ignore_rows_without_values(at_once: int) -> None:
    history = MetricHistory()
    for step in range(1, 41):
        loss = math.nan if step in (11, 12) else 0.04
        history.add(step, {"train/loss": loss, "train/epoch": step / 20, **({"val/loss": 0.3} if step == 5 else {})})
        if step % at_once == 0:
            history.series("train/loss")
    assert history.epochs("train/loss") == pytest.approx([0.04, 0.04])
    assert history.epochs("val/loss") == pytest.approx([0.3])


@pytest.mark.parametrize("at_once", [1, 2, 5, 1000])
def test_epochs_are_independent_of_read_intervals(at_once: int) -> None:
    history, rng = MetricHistory(), np.random.default_rng(3)
    losses = rng.standard_normal(300)
    for step, loss in enumerate(losses, start=1):  # seven steps an epoch, the last of which is not always logged
        epoch = {} if step % 14 == 0 else {"train/epoch": step / 7}
        history.add(step, {"train/loss": loss, **epoch})
        if step % at_once == 0:
            history.series("train/loss")
    logged = [
        [loss for each, loss in enumerate(losses[first : first + 7], first + 1) if each % 14]
        for first in range(0, 294, 7)
    ]
    assert history.epochs("train/loss") == pytest.approx([np.mean(each) for each in logged])
    assert history.num_epochs("train/loss") == 42 and history.num_epochs("val/loss") == 0


def test_non_finite_losses_are_counted_but_excluded_from_means() -> None:
    history = MetricHistory()
    for step, loss in enumerate((1.0, math.nan, math.inf, 2.0, math.nan), start=1):
        history.add(step, {"train/loss": loss, "train/epoch": step / 5})
    loss = history.series("train/loss")
    assert (loss.nonfinite_streak, loss.num_nonfinite(2), loss.num_nonfinite(9)) == (1, 1, 3)
    assert history.series("train/loss").recent().tolist() == [1.0, 2.0]
    assert history.epochs("train/loss").tolist() == [1.5]


def test_non_finite_epochs_are_ignored() -> None:
    history = MetricHistory()
    for step, epoch in enumerate((0.5, math.nan, math.inf, 1.0), start=1):
        history.add(step, {"train/loss": float(step), "train/epoch": epoch})
    assert history.series("train/loss").num_points == 4 and history.steps_per_epoch == 4
    assert history.epochs("train/loss").tolist() == [2.5]
    history.add(5, {"train/epoch": 1e-320})
    assert history.steps_per_epoch == 4


def test_trend_and_noise_of_known_line() -> None:
    rng = np.random.default_rng(0)
    values = np.linspace(0, 5, 500) + 0.5 * rng.standard_normal(500)
    found = trend(values)
    assert found.change == pytest.approx(5, rel=0.03) and found.sign == 1 and found.rises(1e-9)
    assert noise(values) == pytest.approx(0.5, rel=0.1)
    assert trend(-values).falls(1e-9) and not trend(-values).rises(0.4)
    assert not trend(rng.standard_normal(11)).rises(1e-3)


def test_constant_series_has_no_trend() -> None:
    found = trend(np.ones(10))
    assert (found.change, found.sign, found.p_value) == (0.0, 0, 1.0)
    assert not found.rises(0.9) and not found.falls(0.9) and noise(np.ones(10)) == 0


def test_monotone_p_values_equal_permutation_test() -> None:
    assert trend(np.arange(7.0)).p_value == pytest.approx(1 / math.factorial(7))
    swapped = np.array([0.0, 2, 1, 3, 4, 5, 6])  # one of the seven orders that are at least as close to rising
    assert trend(swapped).p_value == pytest.approx(7 / math.factorial(7))


def test_short_series_has_trend_only_if_monotone() -> None:
    assert trend(np.array([1.0, 2, 3, 4])).rises(1e-3)  # one of 24 orders: p = 0.04
    assert not trend(np.array([1.0, 3, 2, 4])).rises(1e-3)
    assert not trend(np.array([1.0, 2])).rises(1e-3)


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [{"lr_warmup_steps_ratio": 0.1}, {"lr_warmup_steps": 7}])
@pytest.mark.parametrize("epochs", [2, 1])
def test_schedule_equals_verl(kind: Schedule, warmup: dict[str, Any], epochs: int) -> None:
    config = SFTConfig(optim=OptimConfig(lr=3e-4, lr_scheduler=kind, min_lr_ratio=0.1, **warmup))
    config.trainer.total_epochs = epochs
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.optim.lr)
    scheduler = build_scheduler(optimizer, config.optim, max(30 * epochs, 40))
    expected = schedule_of(as_dict(config), 40, 30)
    assert expected is not None
    for step in range(1, 41):
        assert expected.at(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        assert expected.at(step + 1, num_skipped=1) == expected.at(step)
        optimizer.step()
        scheduler.step()


def test_schedule_counts_updates_not_steps() -> None:
    config = GRPOConfig(optim=OptimConfig(lr=1e-3, lr_scheduler="cosine", lr_warmup_steps=1))
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 8, 4, 3
    config.trainer.total_epochs = 1
    schedule = schedule_of(as_dict(config), 10, 10)
    assert schedule is not None
    assert schedule.updates_per_step == 6 and schedule.length == 60 and schedule.warmup == 6
    assert schedule.at(2) == 1e-3 and schedule.at(11) == pytest.approx(0.0)


def test_controller_has_no_fixed_schedule() -> None:
    assert schedule_of(as_dict(BudgetConfig()), 10, 10) is None
    assert schedule_of(as_dict(SFTConfig()), 10, None) is None


def row(attempt: int, step: int) -> dict[str, float]:
    keys = {"step": step, "attempt": attempt, "time": float(step)}
    return {**keys, "train/loss": float(attempt), "train/epoch": step / 4}


ROWS = [*(row(1, step) for step in (1, 2, 3)), *(row(2, step) for step in (2, 3, 4))]
ATTEMPTS = [{"attempt": 1, "first_step": 0}, {"attempt": 2, "first_step": 1}, {"attempt": 3, "first_step": None}]


def test_rows_repeated_by_later_attempt_are_replaced(tmp_path: Path) -> None:
    kept = [(row["attempt"], row["step"]) for row in effective_rows(iter(ROWS), ATTEMPTS)]
    assert kept == [(1, 1), (2, 2), (2, 3), (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    history, early = read_history(tmp_path, ATTEMPTS, snapshot_at=2)
    assert history.series("train/loss").recent().tolist() == [1.0, 2.0, 2.0, 2.0] and history.steps_per_epoch == 4
    assert history.epochs("train/loss").tolist() == [1.75] and history.time == 4.0
    assert early.step == 2 and early.series("train/loss").recent().tolist() == [1.0, 2.0]
    assert read_history(tmp_path, ATTEMPTS, until=2)[0].step == 2
    assert read_history(tmp_path, ATTEMPTS, snapshot_at=9)[1].step == 4
    assert read_history(tmp_path / "none", ATTEMPTS)[0].step == 0


@pytest.mark.parametrize(
    ("second", "third", "kept"),
    [
        ({"first_step": 1, "last_step": 1}, {"first_step": 3}, [1, 2, 3, 4]),  # it ended before its first step
        ({"first_step": 1, "last_step": None}, {"first_step": 3}, [1, 2, 3, 4]),  # it was killed before
        ({"first_step": 1, "last_step": 2}, {"first_step": 3}, [1, 4]),
        ({"first_step": 3, "last_step": 3}, {"first_step": 1, "last_step": None}, [1, 4]),  # it may log soon
    ],
)
def test_attempt_without_steps_discards_nothing(
    second: dict[str, int | None], third: dict[str, int | None], kept: list[int]
) -> None:
    attempts = [{"attempt": 1, "first_step": 0, "last_step": 3}, {"attempt": 2, **second}, {"attempt": 3, **third}]
    rows = [*(row(1, step) for step in (1, 2, 3)), row(3, 4)]
    assert [each["step"] for each in effective_rows(iter(rows), attempts)] == kept


def calls_to_read(run_dir: Path, num_metrics: int) -> int:
    """The number of function calls while a history of 1,000 rows is read."""
    run_dir.mkdir()
    metrics = {f"train/metric_{number}": 0.5 for number in range(num_metrics)}
    rows = ({**row(2, step), **metrics} for step in range(1, 1001))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read_history(run_dir, ATTEMPTS)
    finally:
        sys.setprofile(None)
    return num_calls


def test_reading_history_needs_no_call_per_value(tmp_path: Path) -> None:
    few, many = calls_to_read(tmp_path / "few", 4), calls_to_read(tmp_path / "many", 44)
    assert (many - few) / (1000 * 40) < 0.2 and few / 1000 < 50
