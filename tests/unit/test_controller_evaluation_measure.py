"""The interference detector repeats a run if its own probe was slow, however long the run took."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_ext.controller.evaluation.measure import DISTURBED, MAX_ATTEMPTS, InterferenceDetector


def detector_of(durations: Iterator[float]) -> InterferenceDetector:
    """A detector whose probe takes these times, in seconds."""
    now, inside = 0.0, False

    def clock() -> float:
        nonlocal now, inside
        now += next(durations) if inside else 0.0
        inside = not inside
        return now

    return InterferenceDetector(True, clock)


@pytest.mark.parametrize(
    ("durations", "made"),
    [
        ([1.0, 1.0, 1.0, 1.1], [1, 1]),
        ([1.0, 2.0, 1.0, 1.0], [2]),  # disturbed after the run
        ([1.0, 1.0, 2.0, 1.0, 1.0, 1.0], [1, 2]),  # before it
        ([2.0] * 2 * MAX_ATTEMPTS, [MAX_ATTEMPTS]),
    ],
)
def test_disturbed_run_is_repeated(durations: list[float], made: list[int]) -> None:
    detector = detector_of(iter([1.0] * 40 + durations))
    for _ in range(20):
        detector.run(lambda: None)
    assert detector.num_retries == 0
    for expected in made:
        runs: list[None] = []
        assert detector.run(lambda: runs.append(None) or len(runs)) == expected  # noqa: B023
    assert detector.num_retries == sum(made) - len(made)
    assert detector.retries_per_run == detector.num_retries / (20 + len(made)) and DISTURBED < 2


def test_disabled_detector_runs_everything_once() -> None:
    detector = InterferenceDetector(False, clock=lambda: pytest.fail("nothing is timed"))
    assert [detector.run(lambda: 7) for _ in range(3)] == [7, 7, 7] and detector.retries_per_run == 0
