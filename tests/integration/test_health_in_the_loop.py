"""A health rule stops a run with a checkpoint, a status and a reason, and the same command resumes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers.commands import NUM_STEPS, SFTRun
from verl_ext.errors import UNHEALTHY_EXIT_CODE

# A loss of about 6 at the beginning is wrong for weights that were trained, and the rule decides after five steps.
SICK = ("health.stop_on=[initial_loss]", "health.every=1", "trainer.save_freq=-1")
STOPPED_AT = 5


def slightly_trained(model: Path, copy: Path) -> Path:
    """A copy of an untrained model whose norm weights differ from their initial values."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 0.1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_health_rule_stops_run_and_same_command_resumes(quickstart: Path, sft_run: SFTRun, tmp_path: Path) -> None:
    assert not (sft_run.run_dir / "events.jsonl").exists()  # it began from weights that were never trained
    assert sft_run.losses()[1] > 5 and sft_run.record()["untrained_loss"] > 5
    model = slightly_trained(quickstart / "model", tmp_path / "model")
    run_dir = tmp_path / "run"
    run = SFTRun(quickstart, run_dir, f"model.partial_pretrain={model}", *SICK)
    stopped = run.start()
    assert stopped.returncode == UNHEALTHY_EXIT_CODE, stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert "warning: initial_loss: " in stopped.stdout
    reason = f"stopped by the health rule initial_loss after step {STOPPED_AT}"
    assert run.record()["status"] == "stopped" and run.attempts()[0]["exit_reason"] == reason
    assert f"S{reason[1:]}" in stopped.stdout
    assert run.names() == {str(STOPPED_AT)} and run.tracker() == str(STOPPED_AT)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    [event] = [each for each in events if each["name"] == "initial_loss"]
    assert (event["step"], event["attempt"], event["level"]) == (STOPPED_AT, 1, "warning") and event["time"] > 0

    run.finish()  # the same finding at the beginning of the run does not stop it again
    assert run.record()["status"] == "finished" and run.attempts()[1]["first_step"] == STOPPED_AT
    assert set(run.losses(2)) == set(range(STOPPED_AT + 1, NUM_STEPS + 1))


def test_rejects_unknown_health_rule(quickstart: Path, tmp_path: Path) -> None:
    refused = SFTRun(quickstart, tmp_path, "health.stop_on=[loss_risin]").start()
    assert refused.returncode == 2 and refused.stderr.startswith("error: health.stop_on")
    assert "'loss_risin'" in refused.stderr and "loss_rising" in refused.stderr
    assert not (tmp_path / "metrics.jsonl").exists()
