"""The interference detector repeats a run if its own probe was slow, however long the run took."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from verl_ext.controller.evaluation import measure
from verl_ext.controller.evaluation.measure import DISTURBED, MAX_ATTEMPTS, InterferenceDetector


def clock_of(durations: Iterator[float]) -> Callable[[], float]:
    """A clock that makes the detector's probe take these times, in seconds."""
    now, inside = 0.0, False

    def clock() -> float:
        nonlocal now, inside
        now += next(durations) if inside else 0.0
        inside = not inside
        return now

    return clock


@pytest.mark.parametrize(
    ("durations", "made"),
    [
        ([1.0, 1.0, 1.0, 1.1], [1, 1]),
        ([1.0, 2.0, 1.0, 1.0], [2]),  # disturbed after the run
        ([1.0, 1.0, 2.0, 1.0, 1.0, 1.0], [1, 2]),  # before it
        ([2.0] * 2 * MAX_ATTEMPTS, [MAX_ATTEMPTS]),
    ],
)
def test_disturbed_run_is_repeated(durations: list[float], made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "perf_counter", clock_of(iter([1.0] * 40 + durations)))
    detector = InterferenceDetector(True)
    for _ in range(20):
        detector.run(lambda: None)
    assert detector.num_retries == 0
    for expected in made:
        runs: list[None] = []
        assert detector.run(lambda: runs.append(None) or len(runs)) == expected  # noqa: B023
    assert detector.num_retries == sum(made) - len(made)
    assert detector.retries_per_run == detector.num_retries / (20 + len(made)) and DISTURBED < 2


def test_disabled_detector_runs_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "perf_counter", lambda: pytest.fail("nothing is timed"))
    detector = InterferenceDetector(False)
    assert [detector.run(lambda: 7) for _ in range(3)] == [7, 7, 7] and detector.retries_per_run == 0
