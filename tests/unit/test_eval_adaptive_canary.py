"""A run that something disturbed is measured again, by the canary's word alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eval_pipeline.adaptive.canary import DISTURBED, MOST_TRIES, Canary


def canary_of(durations: Iterator[float]) -> Canary:
    """One whose work takes these times, in seconds."""
    now, inside = 0.0, False

    def clock() -> float:
        nonlocal now, inside
        now += next(durations) if inside else 0.0
        inside = not inside
        return now

    return Canary(True, clock)


@pytest.mark.parametrize(
    ("durations", "made"),
    [
        ([1.0, 1.0, 1.0, 1.1], [1, 1]),
        ([1.0, 2.0, 1.0, 1.0], [2]),  # disturbed behind the run
        ([1.0, 1.0, 2.0, 1.0, 1.0, 1.0], [1, 2]),  # before it
        ([2.0] * 2 * MOST_TRIES, [MOST_TRIES]),
    ],
)
def test_it_is_run_until_it_was_calm(durations: list[float], made: list[int]) -> None:
    canary = canary_of(iter([1.0] * 40 + durations))
    for _ in range(20):
        canary.calm(lambda: None)
    assert canary.num_again == 0
    for expected in made:
        runs: list[None] = []
        assert canary.calm(lambda: runs.append(None) or len(runs)) == expected  # noqa: B023
    assert canary.num_again == sum(made) - len(made)
    assert canary.share_again == canary.num_again / (20 + len(made)) and DISTURBED < 2


def test_where_it_is_not_wanted_everything_runs_once() -> None:
    canary = Canary(False, clock=lambda: pytest.fail("nothing is timed"))
    assert [canary.calm(lambda: 7) for _ in range(3)] == [7, 7, 7] and canary.share_again == 0
