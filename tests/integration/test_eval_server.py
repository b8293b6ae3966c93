"""`run` on the model of a server: how it identifies the model, and a server that dies during the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.evaluation import evaluate, jobs, read_lines, slow_problems, started, write_recipe
from tests.helpers.processes import wait_until
from tests.helpers.servers import ANSWER, serving

NUM_PROBLEMS = 8


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    problems = slow_problems(NUM_PROBLEMS, 0)
    return write_recipe(tmp_path / "served.yaml", {"tier1": {"sums": problems}}, batch_size=NUM_PROBLEMS)


def words(recipe: Path, port: int, *further: str) -> tuple[str | Path, ...]:
    """The command, which writes to `place` next to the recipe."""
    engine = ("engine.kind=openai", f"engine.base_url=http://127.0.0.1:{port}/v1")
    return ("run", "--recipe", recipe, "--output", recipe.parent / "place", "--no-wandb", *engine, *further)


def metrics_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "metrics.json").read_text())["datasets"]["sums"]


def test_evaluation_survives_server_restart(recipe: Path, tmp_path: Path) -> None:
    place, log = tmp_path / "place", tmp_path / "run.log"
    patience = ("engine.timeout_s=2", "engine.concurrency=1", "max_attempts=12", "backoff_s=0.5")
    with serving(num_answers=3, text=f"{ANSWER}\nfirst life") as (server, port):
        with started(log, *words(recipe, port, *patience)) as run:
            server.wait()  # it kills itself
            [job] = wait_until(lambda: [job for job in jobs(place) if job.attempts >= 1], run)
            assert f"http://127.0.0.1:{port}/v1" in job.error
            with serving(port=port, text=f"{ANSWER}\nsecond life"):
                assert run.wait() == 0, log.read_text()
    assert (metrics_of(place)["api_error_rate"], metrics_of(place)["accepted_at_1"]) == (0.0, 1.0)
    (path,) = (place / "work" / "sums").glob("answers-*.jsonl")
    lives = [" ".join(row["text"].split()[-2:]) for row in read_lines(path)]
    assert sorted(lives) == ["first life"] * 3 + ["second life"] * (NUM_PROBLEMS - 3)  # received answers are kept
    assert "Traceback" not in log.read_text()
    [job] = jobs(place)
    assert (job.checkpoint, job.state) == ("tiny", "done")


def test_served_model_is_identified_by_server_report(recipe: Path, tmp_path: Path) -> None:
    with serving() as (_, port):
        first = evaluate(*words(recipe, port))
        assert first.returncode == 0, first.stderr
        assert first.stdout.startswith("Evaluated: tiny\n")
        missing = evaluate(*words(recipe, port, "engine.model=large"))
        assert missing.returncode == 2 and "does not serve large" in missing.stderr and "tiny" in missing.stderr
    assert json.loads((tmp_path / "place" / "metrics.json").read_text())["export"] == "tiny"
    with serving() as (_, other):
        again = evaluate(*words(recipe, other))
        assert again.stdout.startswith("Already evaluated: tiny\n") and str(tmp_path / "place") in again.stdout
        assert "specify another --output" in again.stdout
    with serving(root="org/other", text="no answer") as (_, port):
        assert evaluate(*words(recipe, port)).returncode == 0
    assert metrics_of(tmp_path / "place")["accepted_at_1"] == 0.0  # the same name, but another model


def test_unreachable_server_leaves_no_output(recipe: Path, tmp_path: Path) -> None:
    process = evaluate(*words(recipe, 9))
    assert process.returncode == 2 and "http://127.0.0.1:9/v1" in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "place").exists()
