"""What the rules look at: series, epochs, trends, the schedule, and a run's rows without those done again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_ext.config.schema import as_dict
from verl_ext.health.history import History
from verl_ext.health.replay import replay, rows_in_force
from verl_ext.health.schedule import schedule_of
from verl_ext.health.series import FIRST_BUCKET, MOST_BUCKETS, MOST_FIRST, MOST_RECENT, Series
from verl_ext.health.trends import noise_of, rises, trend_of
from verl_ext.trainer.config import OptimConfig, Schedule
from verl_ext.trainer.optimizer import build_scheduler
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, SFTConfig


def test_a_series_keeps_its_ends_and_means_of_all_and_no_more() -> None:
    series, values = Series(), np.arange(100_000, dtype=float)
    for step, value in enumerate(values, start=1):
        series.add(step, value)
    assert series.first.tolist() == values[:MOST_FIRST].tolist()
    assert series.recent().tolist() == values[-MOST_RECENT:].tolist() and series.recent(3).tolist() == [*values[-3:]]
    assert series.points(2) == [(99_999, 99_998.0), (100_000, 99_999.0)]
    assert (series.last_step, series.last_value, series.num_points) == (100_000, 99_999.0, 100_000)
    buckets = series.buckets
    assert MOST_BUCKETS // 2 <= len(buckets) < MOST_BUCKETS
    size = int(buckets[1] - buckets[0])
    assert size % FIRST_BUCKET == 0 and np.allclose(buckets, values[: size * len(buckets)].reshape(-1, size).mean(1))


def test_epochs_are_means_over_their_steps_once_they_are_over() -> None:
    history = History()
    for step in range(1, 8):  # three steps an epoch
        history.add(step, {"train/loss": float(step), "train/epoch": step / 3})
        history.add(step, {"val/loss": 1.0})
    assert history.epochs("train/loss").tolist() == [2.0, 5.0]
    assert history.epochs("val/loss").tolist() == [] and history.series("val/loss").num_points == 7
    assert history.epochs("nothing").tolist() == [] and math.isnan(history.series("nothing").last_value)


def test_losses_that_are_no_numbers_are_counted_and_spoil_no_mean() -> None:
    history = History()
    for step, loss in enumerate((1.0, math.nan, math.inf, 2.0, math.nan), start=1):
        history.add(step, {"train/loss": loss, "train/epoch": step / 5})
    assert history.nonfinite_streak == 1 and history.series("train/loss").recent().tolist() == [1.0, 2.0]
    assert history.epochs("train/loss").tolist() == [1.5]


def test_trend_and_noise_of_a_known_line() -> None:
    rng = np.random.default_rng(0)
    values = np.linspace(0, 5, 500) + 0.5 * rng.standard_normal(500)
    trend = trend_of(values)
    assert trend.change == pytest.approx(5, rel=0.03) and trend.noise == pytest.approx(0.5, rel=0.1)
    assert noise_of(values) == pytest.approx(0.5, rel=0.1)
    assert trend.z == pytest.approx(trend.change / (trend.noise * math.sqrt(12 / 500)))
    assert trend_of(np.ones(10)).z == 0 and trend_of(np.arange(10.0)).z > 1e6
    assert rises(np.arange(11.0)) and not rises(-np.arange(11.0)) and not rises(rng.standard_normal(11))


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [{"lr_warmup_steps_ratio": 0.1}, {"lr_warmup_steps": 7}])
@pytest.mark.parametrize("epochs", [2, 1])
def test_the_schedule_is_what_verl_does(kind: Schedule, warmup: dict[str, Any], epochs: int) -> None:
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


def test_several_updates_in_a_step_move_the_schedule_as_often() -> None:
    config = GRPOConfig(optim=OptimConfig(lr=1e-3, lr_scheduler="cosine", lr_warmup_steps=1))
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 8, 4, 3
    config.trainer.total_epochs = 1
    schedule = schedule_of(as_dict(config), 10, 10)
    assert schedule is not None
    assert schedule.updates_per_step == 6 and schedule.length == 60 and schedule.warmup == 6
    assert schedule.at(2) == 1e-3 and schedule.at(11) == pytest.approx(0.0)


def test_a_controllers_rate_follows_measurements_and_no_schedule() -> None:
    assert schedule_of(as_dict(BudgetConfig()), 10, 10) is None
    assert schedule_of(as_dict(SFTConfig()), 10, None) is None


def row(attempt: int, step: int) -> dict[str, float]:
    keys = {"step": step, "attempt": attempt, "time": float(step)}
    return {**keys, "train/loss": float(attempt), "train/epoch": step / 4}


ROWS = [*(row(1, step) for step in (1, 2, 3)), *(row(2, step) for step in (2, 3, 4))]
ATTEMPTS = [{"attempt": 1, "first_step": 0}, {"attempt": 2, "first_step": 1}, {"attempt": 3, "first_step": None}]


def test_rows_that_a_later_attempt_did_again_do_not_count(tmp_path: Path) -> None:
    kept = [(row["attempt"], row["step"]) for row in rows_in_force(iter(ROWS), ATTEMPTS)]
    assert kept == [(1, 1), (2, 2), (2, 3), (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    history, steps_per_epoch = replay(tmp_path, ATTEMPTS)
    assert history.series("train/loss").recent().tolist() == [1.0, 2.0, 2.0, 2.0] and steps_per_epoch == 4
    assert history.epochs("train/loss").tolist() == [1.75] and history.time == 4.0
    assert replay(tmp_path, ATTEMPTS, until=2)[0].step == 2
    assert replay(tmp_path / "none", ATTEMPTS)[0].step == 0
