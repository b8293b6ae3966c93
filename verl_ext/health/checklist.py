"""The three checklists of a run (after a hundred steps, at every checkpoint, at the end), and its trends."""

from __future__ import annotations

import importlib.util
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_ext.checkpoint.manifest import EXPORT, has_export, list_checkpoints, read_tracker, step_of, why_incomplete
from verl_ext.commands import program
from verl_ext.files import format_bytes
from verl_ext.hardware import gpu_id, listed_gpus, visible_gpus
from verl_ext.health.checks import learning_metrics
from verl_ext.health.context import LANGUAGE
from verl_ext.health.rule import LOSS, VAL_LOSS, CheckResult, Finding, HealthView, Level, alarm, notice, ok, warning
from verl_ext.health.run_directory import EARLY_STEPS, KILLED, RunDirectory, silence_s
from verl_ext.health.trend import trend
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.wandb_files import sync_command

BUSY_SHARE = 0.8
"""Fraction of time for which GPUs should be busy."""
GPU_SAMPLES, GPU_PAUSE_S = 10, 0.2
SIZE_MARGIN = 0.2
"""Fraction by which the checkpoint sizes of a run may differ."""
TROUBLE = re.compile(r"NCCL|timeout|timed out|out of memory|OutOfMemory|\bOOM\b|SIGKILL", re.IGNORECASE)
MIN_TREND_EPOCHS = 5
"""With fewer epochs, trends use equal parts of the run instead of epochs."""


@dataclass(frozen=True)
class ChecklistItem:
    """One line of a checklist: an expectation and whether it holds; None without enough data."""

    text: str
    result: CheckResult | None


def checklists(run: RunDirectory) -> dict[str, list[ChecklistItem]]:
    """Return the three checklists by title."""
    is_due = run.history.step >= EARLY_STEPS or run.status != "running"
    title = f"After {EARLY_STEPS} steps" + ("" if is_due else f" (at step {run.history.step} so far)")
    return {
        title: list(first_steps(run)),
        "At every checkpoint": list(each_checkpoint(run)),
        "At the end": list(end_of_run(run)),
    }


def first_steps(run: RunDirectory) -> Iterable[ChecklistItem]:
    """Check the start of a run."""
    early = run.findings(early=True)
    if not run.history.time and (run.path / METRICS_FILE).stat().st_size:
        yield ChecklistItem(f"{METRICS_FILE} can be read", warning("none of its lines is a row of metrics"))
    if run.stage in LANGUAGE:
        yield ChecklistItem("train/loss falls", _of_rules(early, "loss_not_falling", problems=("loss_diverging",)))
    else:
        found = _of_rules(early, "loss_zero", "loss_jitter", problems=("advantages_flat",))
        yield ChecklistItem("train/loss is not 0 throughout, and not extreme", found)
    # from the latest steps: an extended run started with another schedule
    yield ChecklistItem("train/lr(1e-3) follows its schedule", _of_rules(run.findings(), "lr_schedule"))
    found = _of_rules(early, "grad_norm_range", "grad_norm_exploding", problems=("advantages_flat",))
    yield ChecklistItem("train/grad_norm is in range", found)
    yield ChecklistItem("step times are steady", _of_rules(early, "step_time_high", "step_time_rising"))
    yield ChecklistItem(f"GPUs are busy for more than {BUSY_SHARE:.0%} of the time", gpus_are_busy(run))
    yield ChecklistItem("no NCCL errors, timeouts or out-of-memory errors", no_fatal_errors(run))


def each_checkpoint(run: RunDirectory) -> Iterable[ChecklistItem]:
    """Check the checkpoints on disk."""
    found = _of_rules(run.findings(), "val_loss_rising", "overfitting")
    yield ChecklistItem("val/loss does not keep rising", found)
    yield ChecklistItem(f"every checkpoint is complete, including {EXPORT}/", checkpoints_are_complete(run))
    yield ChecklistItem("checkpoints have similar sizes", sizes_are_alike(run))
    yield ChecklistItem("latest_checkpointed_iteration.txt names the newest checkpoint", tracker_names_newest(run))


def end_of_run(run: RunDirectory) -> Iterable[ChecklistItem]:
    """Check how the run ended, or that it is alive."""
    status, last, total = run.status, run.history.step, run.run["total_steps"]
    if status in ("running", KILLED):
        yield ChecklistItem("the run is alive", run_is_alive(run))
    else:
        reason = run.attempt.get("exit_reason") or "unknown reason"
        message = f"{last} of {total} steps, {status}: {reason}"
        is_done = status == "finished" and last == total
        result = ok(message) if is_done else alarm(message) if status == "failed" else notice(message)
        yield ChecklistItem("all steps completed", result)
    findings = run.findings()
    found = _of_rules(findings, "final_loss", problems=("loss_not_finite", "loss_diverging"))
    yield ChecklistItem("the final train/loss is in range", found if run.view.is_near_end else None)
    yield ChecklistItem("the final val/loss is in range", _of_rules(findings, "final_val_loss"))
    yield ChecklistItem("the expected checkpoints exist", expected_checkpoints(run))
    yield ChecklistItem("the W&B run is closed", wandb_is_closed(run))


def _of_rules(findings: Mapping[str, Finding], *names: str, problems: Sequence[str] = ()) -> CheckResult | None:
    """Return the most serious result of some rules; None if none of them has enough data.

    Args:
        problems: rules that count only if they report a problem.
    """
    names += tuple(name for name in problems if name in findings and findings[name].level > Level.OK)
    found = [CheckResult(findings[name].level, findings[name].sentence) for name in names if name in findings]
    return max(found, key=lambda each: each.level, default=None)


# The processes


def run_is_alive(run: RunDirectory) -> CheckResult:
    """Check that a run without a recorded end still runs."""
    death = run.death()
    if death is not None:
        return alarm(f"{death}; run the same command again to resume")
    return ok(f"it was last active {silence_s(run.run, run.history.time):.0f} s ago")


def gpus_are_busy(run: RunDirectory) -> CheckResult | None:
    """Check that the GPUs of the ranks on this machine are busy; None for a run on another machine or without GPUs."""
    is_here = run.attempt.get("host") == socket.gethostname()
    if run.config["trainer"]["device"] != "cuda" or run.status != "running" or not is_here:
        return None
    shares = gpu_utilization(gpus_of_ranks(run))
    if not shares:
        return None
    message = "used for " + ", ".join(f"{share:.0%}" for share in shares)
    are_busy = min(shares) > BUSY_SHARE
    return ok(message) if are_busy else warning(f"{message}; compare the phases of a step (time/train/...)")


def gpus_of_ranks(run: RunDirectory) -> list[str]:
    """Ids of the GPUs that the ranks on this machine use, one each; empty for old runs, which do not record them."""
    environment = run.attempt.get("environment")
    if environment is None:
        return []
    listed = listed_gpus()
    visible = visible_gpus(listed, environment)
    return [gpu_id(name, listed) for name in visible[: run.config["trainer"]["n_gpus_per_node"]]]


def gpu_utilization(ids: Sequence[str]) -> list[float]:
    """Measure the fraction of time for which each GPU is busy, over two seconds.

    Returns:
        One number per GPU; empty without NVML, or if a GPU does not report it, such as one with MIG.
    """
    if not ids or importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByUUID(each) for each in ids]
            percents = np.zeros(len(handles))
            for _ in range(GPU_SAMPLES):
                time.sleep(GPU_PAUSE_S)
                percents += [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
            return (percents / GPU_SAMPLES / 100).tolist()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return []


def no_fatal_errors(run: RunDirectory) -> CheckResult:
    """Check that no attempt ended because of NCCL, a timeout or a lack of memory."""
    attempts = run.run["attempts"]
    message = [
        f"attempt {each['attempt']}: {each['exit_reason']}"
        for each in attempts
        if TROUBLE.search(each.get("exit_reason") or "")
    ]
    return warning("; ".join(message)) if message else ok(f"none in {len(attempts)} attempts")


def wandb_is_closed(run: RunDirectory) -> CheckResult | None:
    """Check that W&B received the end of the run; None while it runs, and for old runs, which do not record it."""
    if "wandb" not in run.config["trainer"]["logger"] or run.status == "running" or not run.attempt:
        return None
    closed = run.attempt.get("closed_trackers")
    if closed is None and run.status != KILLED:
        return None
    if "wandb" in (closed or ()):
        return ok("closed")
    is_offline = any(run.path.glob("wandb/offline-run-*"))
    command = sync_command(run.path, "offline-run-*" if is_offline else "run-* --include-online")
    return warning(f"it was not closed; upload its rows with `{command}`")


# The checkpoints


def checkpoints_are_complete(run: RunDirectory) -> CheckResult | None:
    """Check that every checkpoint is complete and has an export if one is due; None without checkpoints."""
    paths = list_checkpoints(run.path)
    if not paths:
        return None
    problems = {path: reason for path in paths if (reason := why_incomplete(path)) is not None}
    wrong = [f"{path.name}: {reason}" for path, reason in problems.items() if path.exists()]  # else rotation removed it
    if wrong:
        return alarm("; ".join(wrong) + f"; run {program('checkpoint')} verify, and remove incomplete checkpoints")
    exported = [path for path in paths if has_export(path)]
    message = f"{len(paths)} complete, {len(exported)} of them with {EXPORT}/"
    deferred = [each.step for each in run.checkpoints if EXPORT in each.deferred]
    if deferred:
        message += f"; the next start exports step {', '.join(map(str, deferred))}"
    if damaged := [f"global_step_{each.step}" for each in run.checkpoints if each.has_damaged_export]:
        return warning(f"{message}; {', '.join(damaged)}: {EXPORT}/ is damaged")
    steps = {step_of(path) or 0: path.name for path in paths if path not in exported}
    missing = [name for step, name in steps.items() if step not in deferred and _export_is_due(run, step)]
    advice = f"{', '.join(missing)} should have one, too; run {program('checkpoint')} export"
    return warning(f"{message}; {advice}") if missing else ok(message)


def _export_is_due(run: RunDirectory, step: int) -> bool:
    """Whether the last attempt had to export at a step."""
    checkpoint = run.config["trainer"].get("checkpoint") or {}
    if step <= run.first_step or "hf_model" not in checkpoint.get("save_contents", ()):
        return False
    every = (checkpoint.get("export") or {}).get("every")
    return every is None or step % every == 0 or step == run.run["total_steps"]


def sizes_are_alike(run: RunDirectory) -> CheckResult | None:
    """Check that complete checkpoints have similar sizes; None without checkpoints."""
    sizes = [each.num_bytes for each in run.checkpoints]
    if not sizes:
        return None
    message = f"from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    if max(sizes) <= (1 + SIZE_MARGIN) * min(sizes):
        return ok(message)
    return notice(f"{message}; exports may be less frequent than saves, or an optimizer was dropped")


def tracker_names_newest(run: RunDirectory) -> CheckResult | None:
    """Check that `latest_checkpointed_iteration.txt` names the newest complete checkpoint; None without any."""
    if not run.checkpoints:
        return None
    newest = run.checkpoints[0].step
    tracked, problem = read_tracker(run.path)
    if tracked is None:
        return warning(f"it {problem}; the next start uses the newest complete checkpoint")
    message = f"it names {tracked.name}"
    return ok(message) if step_of(tracked) == newest else warning(f"{message}, but global_step_{newest} is newer")


def expected_checkpoints(run: RunDirectory) -> CheckResult | None:
    """Check that all checkpoints exist that were due and that rotation keeps; None if none was due yet."""
    total, every, last = run.run["total_steps"], run.config["trainer"]["save_freq"], run.history.step
    if total is None or run.status == "waiting":
        return None
    due = total if last >= total else last - last % every if every > 0 else 0
    if run.status in ("running", KILLED) and every > 0:
        due = (due - 1) // every * every  # the save that is due now may be in progress, or was interrupted
    if due <= 0:
        return None
    steps = [each.step for each in run.checkpoints]
    if not any(step >= due for step in steps):
        newest = f"the newest complete step is {max(steps)}" if steps else "there is no complete checkpoint"
        return alarm(f"global_step_{due} was due but is missing; {newest}")
    message = f"{len(steps)} kept, the newest is global_step_{max(steps)}"
    max_kept = run.config["trainer"].get("max_ckpt_to_keep")
    scheduled = range(run.first_step // every * every + every, due, every) if every > 0 else ()
    missing = [  # although fewer newer ones exist than rotation keeps
        f"global_step_{step}"
        for step in scheduled
        if step not in steps and (max_kept is None or sum(each > step for each in steps) < max_kept)
    ]
    return warning(f"{message}; {', '.join(missing)} should be kept, too") if missing else ok(message)


# Trends


@dataclass(frozen=True)
class MetricTrend:
    """The trend of a metric over the whole run.

    Attributes:
        better: 1 if it should rise, -1 if it should fall.
        first: the first mean.
        last: the last mean.
        count: number of means.
        unit: unit of the means: epochs, parts of the run or validations.
        sign: 1 if the metric rises, -1 if it falls, 0 if neither is significant or if the last mean contradicts it.
        p_value: one-sided p-value of the direction (Mann-Kendall).
    """

    metric: str
    better: int
    first: float
    last: float
    count: int
    unit: str
    sign: int
    p_value: float

    @property
    def sentence(self) -> str:
        """The trend in words."""
        word = {1: "rises", -1: "falls", 0: "shows no steady trend"}[self.sign]
        verdict = "" if not self.sign else " (good)" if self.sign == self.better else " (bad)"
        message = f"{self.metric} {word}{verdict}: {self.first:.4g} to {self.last:.4g}"
        return f"{message} over {self.count} {self.unit}, p = {self.p_value:.2g}"


def metric_trends(view: HealthView) -> list[MetricTrend]:
    """Return the trends of a run's main metrics that it has logged often enough."""
    directions = {LOSS: -1, VAL_LOSS: -1} if view.context.stage in LANGUAGE else learning_metrics(view)
    found = []
    for name, better in directions.items():
        values, unit = view.history.epochs(name), "epochs"
        if len(values) < MIN_TREND_EPOCHS:
            is_rare = name == VAL_LOSS
            values = view.series(name).recent() if is_rare else view.series(name).segment_means
            unit = "validations" if is_rare else "parts of the run"
        if len(values) >= 3:
            moved, ends = trend(values), (float(values[0]), float(values[-1]))
            # ranks ignore sizes: a loss can fall for most of the run, and then explode
            is_steady = moved.goes(moved.sign, view.limits.improvement_p) and moved.sign * (ends[1] - ends[0]) > 0
            sign = moved.sign if is_steady else 0
            found.append(MetricTrend(name, better, *ends, len(values), unit, sign, moved.p_value))
    return found
