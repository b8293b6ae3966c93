"""The monitor's follower: what cannot be read is told once, and it goes on with the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import wait_until
from verl_ext.monitor.follow import Follower


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follower:
    """Of two runs that never have anything more."""
    made = Follower(tmp_path / "monitor.sqlite", tmp_path / "checkpoints")
    monkeypatch.setattr(made._ingest, "find_runs", lambda: [1, 2])
    monkeypatch.setattr(made._ingest, "running", lambda: [1, 2])
    monkeypatch.setattr(made._ingest, "take", lambda run: False)
    return made


def follow_until(is_over: Callable[[], bool], follower: Follower) -> None:
    """Let it look until something holds."""
    follower.start()
    wait_until(is_over)
    assert follower.is_alive()
    follower.stop()


def test_a_run_that_cannot_be_read_does_not_hold_up_the_others(
    follower: Follower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[int] = []

    def take(run: int) -> bool:
        taken.append(run)
        if run == 1:
            raise OSError("a bad sector")
        return False

    monkeypatch.setattr(follower._ingest, "take", take)
    follow_until(lambda: min(taken.count(1), taken.count(2)) >= 3, follower)
    assert capsys.readouterr().err.count("run 1 cannot be followed: OSError: a bad sector") == 1


def test_it_looks_again_when_runs_could_not_be_looked_for(
    follower: Follower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []

    def running() -> list[int]:
        looks.append(1)
        if len(looks) < 4:
            raise OSError("the database is locked")
        return []

    monkeypatch.setattr(follower._ingest, "running", running)
    follow_until(lambda: len(looks) >= 5, follower)
    assert capsys.readouterr().err.count("runs cannot be looked for: OSError: the database is locked") == 1
