"""`run` on the model of a server: which one it is, and a server that dies in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.evaluation import (
    LEARNT,
    evaluate,
    read_lines,
    slow_problems,
    started,
    statuses,
    wait_until,
    write_recipe,
)
from tests.integration.test_eval_engines import ENVIRONMENT

NUM_PROBLEMS = 8
FOR_EVER = 1_000_000
ANSWER = next(iter(LEARNT.values()))


@contextmanager
def serving(
    name: str = "tiny", root: str = "org/tiny", port: int = 0, num_answers: int = FOR_EVER, text: str = ANSWER
) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server's process and its port."""
    command = [
        sys.executable,
        "-m",
        "tests.helpers.servers",
        *map(str, (port, name, root, num_answers)),
        text,
    ]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    problems = slow_problems(NUM_PROBLEMS, 0)
    return write_recipe(tmp_path / "served.yaml", {"tier1": {"sums": problems}}, batch_size=NUM_PROBLEMS)


def words(recipe: Path, port: int, *further: str) -> tuple[str | Path, ...]:
    """The command, whose figures go to `place` beside the recipe."""
    engine = ("engine.kind=openai", f"engine.base_url=http://127.0.0.1:{port}/v1")
    return ("run", "--recipe", recipe, "--output", recipe.parent / "place", "--no-wandb", *engine, *further)


def figures(place: Path) -> dict[str, Any]:
    return json.loads((place / "metrics.json").read_text())["datasets"]["sums"]


def test_a_server_that_dies_in_the_middle_and_comes_back(recipe: Path, tmp_path: Path) -> None:
    place, log = tmp_path / "place", tmp_path / "run.log"
    patience = ("engine.timeout_s=2", "engine.concurrency=1", "max_attempts=12", "backoff_s=0.5")
    with serving(num_answers=3, text=f"{ANSWER}\nfirst life") as (server, port):
        with started(log, *words(recipe, port, *patience)) as run:
            server.wait()  # it has killed itself
            (row,) = wait_until(lambda: [row for row in statuses(place) if row["attempts"] >= 1])
            assert f"http://127.0.0.1:{port}/v1" in row["error"]
            with serving(port=port, text=f"{ANSWER}\nsecond life"):
                assert run.wait() == 0, log.read_text()
    assert (figures(place)["api_error_rate"], figures(place)["accepted_at_1"]) == (0.0, 1.0)
    (path,) = (place / "work" / "sums").glob("answers-*.jsonl")
    lives = [" ".join(row["text"].split()[-2:]) for row in read_lines(path)]
    assert sorted(lives) == ["first life"] * 3 + ["second life"] * (NUM_PROBLEMS - 3)  # what came is kept
    assert "Traceback" not in log.read_text()
    (row,) = statuses(place)
    assert (row["checkpoint"], row["state"]) == ("tiny", "done")


def test_a_served_model_is_told_by_what_the_server_says(recipe: Path, tmp_path: Path) -> None:
    with serving() as (_, port):
        first = evaluate(*words(recipe, port))
        assert first.returncode == 0, first.stderr
        assert first.stdout.startswith("Evaluated: tiny\n")
        missing = evaluate(*words(recipe, port, "engine.model=large"))
        assert missing.returncode == 2 and "does not serve large" in missing.stderr and "tiny" in missing.stderr
    assert json.loads((tmp_path / "place" / "metrics.json").read_text())["export"] == "tiny"
    with serving() as (_, other):
        again = evaluate(*words(recipe, other))
        assert again.stdout == f"Evaluated already: tiny\n  figures         {tmp_path / 'place'}\n"
    with serving(root="org/other", text="no answer") as (_, port):
        assert evaluate(*words(recipe, port)).returncode == 0
    assert figures(tmp_path / "place")["accepted_at_1"] == 0.0  # the name is the same and the model another


def test_what_cannot_be_reached_leaves_no_trace(recipe: Path, tmp_path: Path) -> None:
    process = evaluate(*words(recipe, 9))
    assert process.returncode == 2 and "no server answers at http://127.0.0.1:9/v1" in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "place").exists()
