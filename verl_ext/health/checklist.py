"""The three checklists: after a hundred steps, at every checkpoint, at the end."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from verl_ext.checkpoint.manifest import EXPORT
from verl_ext.health import saved
from verl_ext.health.facts import LANGUAGE
from verl_ext.health.findings import Level, Seen, alarm, notice, ok, warning
from verl_ext.health.gpu_use import gpu_use
from verl_ext.health.run_files import EARLY_STEPS, RunFiles
from verl_ext.health.wandb_state import wandb_end
from verl_ext.metrics.run_record import seconds_of

BUSY_SHARE = 0.8
"""Of a GPU's time that training should use."""
SILENCE_STEPS, SILENCE_S = 10, 600.0
"""A run that is silent for longer than so many of its steps, and so many seconds, has likely hung."""
PAUSES = ("time/val/step_s", "time/eval/step_s", "time/train/save_s", "time/checkpoint/write_s")
"""What a run may be silent for."""
TROUBLE = re.compile(r"NCCL|timeout|timed out|out of memory|OutOfMemory|\bOOM\b|SIGKILL", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """One line of a checklist.

    Attributes:
        text: what should be so.
        seen: what is; None where there is too little to tell.
    """

    text: str
    seen: Seen | None


def checklists(files: RunFiles) -> dict[str, list[Point]]:
    """All three by their titles."""
    begun = files.history.step >= EARLY_STEPS or files.run["status"] != "running"
    title = f"After {EARLY_STEPS} steps" + ("" if begun else f" (at step {files.history.step} so far)")
    return {
        title: list(first_steps(files)),
        "At every checkpoint": list(each_checkpoint(files)),
        "At the end": list(the_end(files, time.time())),
    }


def first_steps(files: RunFiles) -> Iterable[Point]:
    """What a run's beginning shows."""
    early = files.findings(early=True)
    seen = partial(_seen, early)
    if files.facts.stage in LANGUAGE:
        yield Point("train/loss falls", seen("loss_not_falling"))
    else:
        yield Point("train/loss is not 0 throughout, and not extreme", worst(seen("loss_zero"), seen("loss_jitter")))
    # of the present steps: a run that was prolonged began on another schedule
    yield Point("train/lr(1e-3) follows its schedule", _seen(files.findings(), "lr_schedule"))
    yield Point("train/grad_norm is in range", worst(seen("grad_norm_range"), seen("grad_norm_exploding")))
    yield Point("step times are steady", worst(seen("step_time_high"), seen("step_time_rising")))
    yield Point(f"GPUs are busy for more than {BUSY_SHARE:.0%} of the time", _gpus(files))
    yield Point("no NCCL timeout, no lack of memory", _trouble(files))


def each_checkpoint(files: RunFiles) -> Iterable[Point]:
    """What the checkpoints on the disk show."""
    found = files.findings()
    yield Point("val/loss does not keep rising", worst(_seen(found, "val_loss_rising"), _seen(found, "overfitting")))
    yield Point(f"every checkpoint is complete, {EXPORT}/ too", saved.exports(files))
    yield Point("the sizes of the checkpoints are alike", saved.sizes(files))
    yield Point("latest_checkpointed_iteration.txt names the newest", saved.tracker(files))


def the_end(files: RunFiles, now: float) -> Iterable[Point]:
    """How the run ended, or that it is alive."""
    run, last = files.run, files.history.step
    total = run["total_steps"]
    if run["status"] == "running":
        yield Point("the run is alive", _alive(files, now))
    else:
        done = run["status"] == "finished" and last == total
        told = f"{last} of {total} steps, {run['status']}: {_reason(files)}"
        yield Point(
            "all steps are done", ok(told) if done else alarm(told) if run["status"] == "failed" else notice(told)
        )
    yield Point("the final train/loss is in range", _seen(files.findings(), "final_loss"))
    yield Point("the expected checkpoints are there", saved.expected(files))
    yield Point("the W&B run is closed", _wandb(files))


def worst(*seen: Seen | None) -> Seen | None:
    """The gravest of several; None where none can tell."""
    return max((each for each in seen if each is not None), key=lambda each: each.level, default=None)


def _seen(findings: dict, name: str) -> Seen | None:
    found = findings.get(name)
    return None if found is None else Seen(found.level, found.sentence)


def _gpus(files: RunFiles) -> Seen | None:
    attempts = files.run["attempts"]
    is_here = bool(attempts) and attempts[-1].get("host") == socket.gethostname()
    if files.config["trainer"]["device"] != "cuda" or files.run["status"] != "running" or not is_here:
        return None
    used = gpu_use()
    if not used:
        return None
    told = "used for " + ", ".join(f"{share:.0%}" for share in used)
    return ok(told) if min(used) > BUSY_SHARE else warning(f"{told}; look at the parts of the step (time/train/...)")


def _trouble(files: RunFiles) -> Seen:
    told = [f"attempt {each['attempt']}: {each['exit_reason']}" for each in files.run["attempts"] if _troubled(each)]
    return warning("; ".join(told)) if told else ok(f"none in {len(files.run['attempts'])} attempts")


def _troubled(attempt: dict) -> bool:
    return bool(TROUBLE.search(attempt.get("exit_reason") or ""))


def _alive(files: RunFiles, now: float) -> Seen:
    silent_s = now - max(files.history.time, _begun(files))
    steps = files.history.series("time/train/step_s").recent(20)
    pauses = (files.history.series(name).recent() for name in PAUSES)
    allowed = max(
        SILENCE_S,
        SILENCE_STEPS * float(np.median(steps)) if len(steps) else 0.0,
        *(2 * float(each.max()) for each in pauses if len(each)),
    )
    told = f"its last row is {silent_s:.0f} s old"
    return (
        ok(told) if silent_s <= allowed else alarm(f"{told}; look at its processes, and start the same command again")
    )


def _begun(files: RunFiles) -> float:
    """When the last attempt began, in seconds since 1970; 0 where that is not known."""
    attempts = files.run["attempts"]
    return (seconds_of(attempts[-1]["start"]) if attempts else None) or 0.0


def _reason(files: RunFiles) -> str:
    attempts = files.run["attempts"]
    return (attempts[-1].get("exit_reason") if attempts else None) or "no reason is known"


def _wandb(files: RunFiles) -> Seen | None:
    if "wandb" not in files.config["trainer"]["logger"] or files.run["status"] == "running":
        return None
    code = wandb_end(files.directory)
    if code is None:
        return warning("its file has no end; python -m wandb sync uploads what there is")
    expected = files.run["status"] == "finished"
    return ok(f"with exit code {code}") if (code == 0) == expected else warning(f"with exit code {code}")


def gravest(points: Iterable[Point]) -> Level:
    """Of all points."""
    return max((each.seen.level for each in points if each.seen is not None), default=Level.OK)
