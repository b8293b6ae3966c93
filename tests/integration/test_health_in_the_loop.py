"""A recipe that stops for a health rule: a checkpoint, a status, a reason, and a way on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.commands import NUM_STEPS, Run
from verl_ext.errors import SICK_EXIT_CODE

# The quickstart's model begins at a loss of about 6, and the rule knows after five steps.
SICK = ("health.stop_on=[initial_loss]", "health.every=1", "health.limits.initial_loss_max=1.0", "trainer.save_freq=-1")
STOPPED_AT = 5


def test_a_rule_stops_the_run_with_a_checkpoint_and_the_same_command_goes_on(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path, *SICK)
    stopped = run.start()
    assert stopped.returncode == SICK_EXIT_CODE, stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert "warning: initial_loss: the loss began at" in stopped.stdout
    record = json.loads((tmp_path / "run.json").read_text())
    reason = f"stopped by the health rule initial_loss after step {STOPPED_AT}"
    assert record["status"] == "stopped" and record["attempts"][0]["exit_reason"] == reason
    assert f"S{reason[1:]}; the same command goes on from there." in stopped.stdout
    assert run.names() == {str(STOPPED_AT)} and run.tracker() == str(STOPPED_AT)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["name"] == "initial_loss"]
    assert (event["step"], event["attempt"], event["level"]) == (STOPPED_AT, 1, "warning") and event["time"] > 0

    assert run.start().returncode == 0  # what stood at its beginning does not stop it again
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished" and record["attempts"][1]["first_step"] == STOPPED_AT
    assert set(run.losses(2)) == set(range(STOPPED_AT + 1, NUM_STEPS + 1))


def test_an_unknown_rule_is_refused_before_anything_starts(quickstart: Path, tmp_path: Path) -> None:
    refused = Run(quickstart, tmp_path, "health.stop_on=[loss_risin]").start()
    assert refused.returncode == 2 and refused.stderr.startswith("error: health.stop_on names 'loss_risin'")
    assert "loss_rising" in refused.stderr and not (tmp_path / "metrics.jsonl").exists()
