"""A health rule stops a run with a checkpoint, a status and a reason, and the same command resumes it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.commands import NUM_STEPS, SFTRun
from verl_ext.errors import SICK_EXIT_CODE

# The quickstart's model begins at a loss of about 6, and the rule decides after five steps.
SICK = ("health.stop_on=[initial_loss]", "health.every=1", "health.limits.initial_loss_max=1.0", "trainer.save_freq=-1")
STOPPED_AT = 5


def test_health_rule_stops_the_run_and_the_same_command_resumes(quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path, *SICK)
    stopped = run.start()
    assert stopped.returncode == SICK_EXIT_CODE, stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert "warning: initial_loss: " in stopped.stdout
    reason = f"stopped by the health rule initial_loss after step {STOPPED_AT}"
    assert run.record()["status"] == "stopped" and run.attempts()[0]["exit_reason"] == reason
    assert f"S{reason[1:]}" in stopped.stdout
    assert run.names() == {str(STOPPED_AT)} and run.tracker() == str(STOPPED_AT)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["name"] == "initial_loss"]
    assert (event["step"], event["attempt"], event["level"]) == (STOPPED_AT, 1, "warning") and event["time"] > 0

    run.finish()  # the same finding at the beginning of the run does not stop it again
    assert run.record()["status"] == "finished" and run.attempts()[1]["first_step"] == STOPPED_AT
    assert set(run.losses(2)) == set(range(STOPPED_AT + 1, NUM_STEPS + 1))


def test_launcher_refuses_an_unknown_rule(quickstart: Path, tmp_path: Path) -> None:
    refused = SFTRun(quickstart, tmp_path, "health.stop_on=[loss_risin]").start()
    assert refused.returncode == 2 and refused.stderr.startswith("error: health.stop_on")
    assert "'loss_risin'" in refused.stderr and "loss_rising" in refused.stderr
    assert not (tmp_path / "metrics.jsonl").exists()
