"""Zooming reads all points of a range, and pages share what they draw and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nicegui import Client

from tests.helpers.monitor import following, look, write_record, write_rows
from tests.helpers.pages import element, on_client, panel_of
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.monitor import database, file_panels, panels, samples
from verl_ext.monitor import follower as follower_module
from verl_ext.monitor.chart_options import ChartStyle, chart_options
from verl_ext.monitor.charts import CHARTS
from verl_ext.monitor.curves import MAX_POINTS, RunCurves
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.panels import ComparePanel, Panel, TrainingPanel
from verl_ext.monitor.sharing import SharedResults
from verl_ext.monitor.state import PageState

NUM_STEPS = 30_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with a peak at step 20,001 within values that repeat."""
    run_dir = tmp_path / "checkpoints/p/e"
    write_record(run_dir, total_steps=NUM_STEPS)
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(1, NUM_STEPS + 1):
            value = 99.0 if step == 20_001 else step % 7
            file.write(f'{{"step": {step}, "attempt": 1, "time": {1000 + 6 * step}, "train/loss": {value}}}\n')
    return tmp_path / "checkpoints"


@pytest.fixture
def follower(root: Path) -> Iterator[RunFollower]:
    with following(root) as made:
        yield made


def zoomed(follower: RunFollower, low: float, high: float) -> tuple[list[float], list[float]]:
    run = follower.runs["p/e"]
    curves = follower.curves(run)
    with curves.lock:
        x, y = follower.zoomed(run, curves, ["train/loss"], low, high)["train/loss"].points()
    return x.tolist(), y.tolist()


def value_at(step: int) -> float:
    return 99.0 if step == 20_001 else step % 7


# Points


@pytest.mark.parametrize(("low", "high"), [(20_000, 20_003), (1, 2000), (8100, 8300), (29_990, 40_000)])
def test_zoom_shows_every_point_of_range(follower: RunFollower, low: int, high: int) -> None:
    expected = range(max(1, low - 1), min(NUM_STEPS, high + 1) + 1)
    x, y = zoomed(follower, low, high)
    assert x == [*expected] and y == [value_at(step) for step in expected]


def test_zoom_into_long_range_is_thinned_and_keeps_peaks(follower: RunFollower) -> None:
    x, y = zoomed(follower, 5000, 25_000)
    assert MAX_POINTS // 4 <= len(x) <= MAX_POINTS and 4999 <= x[0] < 5010
    assert max(y) == 99.0 and x[y.index(99.0)] == 20_001
    assert zoomed(follower, 50_000, 60_000)[0] == []


def test_zoom_parses_no_rows(follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_row", None)
    assert len(zoomed(follower, 100, 200)[0]) == 103


def test_zoom_includes_rows_since_last_save(root: Path, follower: RunFollower) -> None:
    write_rows(root / "p/e", 1, range(NUM_STEPS + 1, NUM_STEPS + 4))
    look(follower)
    x, y = zoomed(follower, NUM_STEPS, NUM_STEPS + 10)
    assert x == [*range(NUM_STEPS - 1, NUM_STEPS + 4)] and y[-1] == NUM_STEPS + 3


def test_points_are_saved_once_by_two_monitors_and_after_restarts(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "DUMP_ROWS", 1)
    other = RunFollower(follower.database_path, root)
    look(other)
    for step in range(NUM_STEPS + 1, NUM_STEPS + 9):
        write_rows(root / "p/e", 1, range(step, step + 1))
        look(other if step % 2 else follower)
        monkeypatch.setattr(follower_module, "DUMP_ROWS", 1 + step % 3)
    for each in (other, follower):
        look(each)
    other.stop()
    run = follower.runs["p/e"].id
    saved = follower.reader.points(run, "train/loss", 0, 1e9)[:, 0]
    assert (np.diff(saved) == 1).all() and saved[0] == 1
    again = RunFollower(follower.database_path, root)
    look(again)
    assert zoomed(again, NUM_STEPS, 1e9)[0] == [*range(NUM_STEPS - 1, NUM_STEPS + 9)]
    again.stop()


def test_visitor_zooms_and_new_rows_keep_the_window(root: Path, follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        panel = panel_of(TrainingPanel, follower, PageState(run="p/e", smoothing=0.0))
        await panel.show()
        [card] = panel._cards.values()
        options = element(client, "chart Loss").options
        assert len(options["series"][0]["data"]) <= MAX_POINTS
        card._zoom(event(20_000.0, 20_010.0))
        assert [x for x, _ in options["series"][0]["data"]] == [*range(19_999, 20_012)]
        write_rows(root / "p/e", 1, range(NUM_STEPS + 1, NUM_STEPS + 2))
        look(follower)
        await panel.show()
        assert card.window == (20_000, 20_010) and len(options["series"][0]["data"]) == 13
        assert (options["xAxis"]["min"], options["xAxis"]["max"]) == (1, NUM_STEPS + 1)
        card._zoom(event(0.0, 1e6))
        assert card.window is None and options["series"][0]["data"][-1][0] == NUM_STEPS + 1

    on_client(check)


def event(*args: float) -> Any:
    """An event of the browser with these arguments."""
    return type("Event", (), {"args": [*args]})


def test_zoomed_comparison_shows_points_of_each_run(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/short")
    write_rows(root / "p/short", 1, range(1, 50))
    look(follower)

    async def check(client: Client) -> None:
        panel = panel_of(ComparePanel, follower, PageState(runs=("p/e", "p/short"), smoothing=0.0))
        await panel.show()
        panel._cards["train/loss"]._zoom(event(10, 12))
        series = element(client, "chart comparison train/loss").options["series"]
        assert [[x for x, _ in line["data"]] for line in series] == [[9, 10, 11, 12, 13]] * 2

    on_client(check)


def test_zoomed_comparison_shows_steps_of_restarted_run(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/again", a1=0, a2=20)
    write_rows(root / "p/again", 1, range(1, 31))
    write_rows(root / "p/again", 2, range(21, 41), loss=7.0)
    look(follower)

    async def check(client: Client) -> None:
        panel = panel_of(ComparePanel, follower, PageState(runs=("p/again",), smoothing=0.0))
        await panel.show()
        panel._cards["train/loss"]._zoom(event(25, 27))
        options = element(client, "chart comparison train/loss").options
        assert list(options["series"][0]["data"]) == [(step, 7) for step in range(24, 29)]
        assert (options["xAxis"]["min"], options["xAxis"]["max"]) == (1, 40)

    on_client(check)


# Axes


def test_axes_of_tokens_and_time_continue_over_attempts_and_restarts() -> None:
    rows = [MetricsRow(step, 1, 60.0 * step, {"train/loss": 1.0, "train/num_loss_tokens": 100}) for step in range(1, 5)]
    rows += [MetricsRow(step, 2, 1e4 + 60.0 * step, {"train/loss": 1.0}) for step in (3, 4)]
    curves = RunCurves()
    curves.add(rows[:3], {1: 0, 2: 2})
    curves = RunCurves.load(*curves.dump())
    curves.add(rows[3:], {1: 0, 2: 2})
    steps = np.array([1.0, 2.5, 4.0])
    assert curves.to_axis(steps, "step") is steps and curves.to_axis(steps, "tokens").tolist() == [100, 250, 400]
    assert curves.to_axis(steps, "time").tolist() == [0, 1.5, 3]
    assert curves.to_steps(np.array([1.5]), "time").tolist() == [2.5]
    assert curves.to_axis(np.array([6.0]), "time") == pytest.approx((1e4 + 180) / 60)
    curves.add([MetricsRow(5, 2, 2e4, {"train/total_valid_token_count": 7})], {})
    assert curves.to_axis(np.array([9.0]), "tokens").tolist() == [407]
    assert {*curves.envelopes} - {"train/total_valid_token_count"} == {"train/loss", "train/num_loss_tokens"}


def test_validation_before_first_step_is_at_no_tokens() -> None:
    curves = RunCurves()
    curves.add([MetricsRow(0, 1, 1.0, {"val/loss": 2.0})], {1: 0})
    curves.add([MetricsRow(step, 1, 1.0, {"train/num_loss_tokens": 100}) for step in (1, 2)], {1: 0})
    curves = RunCurves.load(*curves.dump())
    assert curves.to_axis(np.array([0.0, 1.0, 2.0]), "tokens").tolist() == [0, 100, 200]
    assert curves.ends("tokens") == [0, 200]


def test_chart_is_drawn_by_tokens_or_time() -> None:
    curves = RunCurves()
    curves.add([MetricsRow(step, 1, 60.0 * step, {"train/loss": step}) for step in range(1, 4)], {})
    style, loss = ChartStyle(0.0, axis="time"), replace(CHARTS[0], metrics=("train/loss",))
    options = chart_options(curves, loss, style)
    assert options["series"][0]["data"] == ((0, 1), (1, 2), (2, 3)) and options["xAxis"]["name"] == "minutes"
    options = chart_options(curves, loss, replace(style, axis="tokens"))
    assert options["series"][0]["data"][0][0] == 1 and options["xAxis"]["name"] == "step"  # no tokens are known


# Sharing


def test_ten_pages_draw_and_read_as_often_as_one(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "p/e/samples.jsonl").write_text('{"step": 1, "prompt": "p"}\n')
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, call)

    count(panels, "chart_options")
    count(panels, "comparison_options")
    count(file_panels, "checkpoint_rows")
    count(file_panels, "_look")
    count(samples, "read_samples")
    monkeypatch.setattr(file_panels.CheckpointsPanel, "period_s", 1e9)
    monkeypatch.setattr(file_panels, "_files_state", lambda _: "unchanged")  # otherwise it changes each half minute
    kinds: list[type[Panel]] = [TrainingPanel, ComparePanel, samples.SamplesPanel]
    kinds += [file_panels.CheckpointsPanel, file_panels.HealthPanel]

    async def check(client: Client) -> None:
        for _ in range(10):
            for kind in kinds:
                await panel_of(kind, follower, PageState(run="p/e")).show()
        assert sorted(calls) == sorted(
            ["chart_options", "comparison_options", "checkpoint_rows", "_look", "read_samples"]
        )

    on_client(check)


def test_waiting_threads_share_one_computation() -> None:
    shared, calls, results = SharedResults(4), [], []

    def compute() -> list[int]:
        threading.Event().wait(0.05)
        calls.append(1)
        return calls

    threads = [threading.Thread(target=lambda: results.append(shared.get("a", 1, compute))) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert calls == [1] and len(results) == 8 and all(each is calls for each in results)


def test_results_are_recomputed_for_new_stamps_and_dropped_beyond_size() -> None:
    shared = SharedResults(2)
    calls: list[tuple[str, int]] = []

    def get(key: str, stamp: int, reuse: float = 0.0) -> None:
        def compute() -> None:
            threading.Event().wait(0.01)
            calls.append((key, stamp))

        shared.get(key, stamp, compute, reuse)

    for stamp in (1, 1, 2):
        get("a", stamp)
    get("b", 1)
    get("c", 1)
    get("a", 2)
    assert calls == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("a", 2)]
    calls.clear()
    get("d", 1, reuse=1000.0)
    get("d", 2, reuse=1000.0)
    assert calls == [("d", 1)]


def test_failed_computation_is_repeated() -> None:
    shared = SharedResults(2)
    with pytest.raises(OSError):
        shared.get("a", 1, lambda: open("/nowhere/at/all"))
    assert shared.get("a", 1, lambda: 3) == 3
