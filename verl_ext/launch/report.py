"""What the user is told when the ranks have ended, what run.json keeps of it, and the exit code."""

from __future__ import annotations

import sys
from signal import Signals

from verl_ext.checkpoint.manifest import step_of
from verl_ext.console import print_line, warn
from verl_ext.errors import UserError
from verl_ext.launch.configure import checkpoint_that_suits
from verl_ext.launch.outcome import Failure, Outcome, Stopped
from verl_ext.launch.summary import print_run_summary
from verl_ext.metrics.run_record import EndStatus, RunRecord
from verl_ext.trainer.stages import RunConfig


def report(outcome: Outcome, config: RunConfig, record: RunRecord | None) -> int:
    """Close run.json where the ranks could not, and tell the user.

    Args:
        outcome: of this node's ranks.
        config: the resolved configuration.
        record: of the run; None on nodes other than the first, which writes it for all.

    Returns:
        The exit code of the command.

    Raises:
        UserError: a rank refused its input.
    """
    if isinstance(outcome, Stopped):
        outcome = outcome if record is None else unless_it_had_ended(outcome, record)
    if isinstance(outcome, Failure):
        return report_failure(outcome, config, record)
    if isinstance(outcome, Stopped):
        return report_stop(outcome, config, record)
    if record is not None:
        print_run_summary(config)
    return 0


def unless_it_had_ended(stopped: Stopped, record: RunRecord) -> Outcome:
    """What rank 0 wrote goes first: it may have done all steps, or have failed, by the time the ranks were ended."""
    run = record.read()
    if run["status"] == "finished":
        return None
    if run["status"] == "failed":
        return Failure(run["attempts"][-1]["exit_reason"], exit_code=1)
    return stopped


def report_failure(failure: Failure, config: RunConfig, record: RunRecord | None) -> int:
    """Tell the user once why the ranks ended, and return the exit code."""
    if failure.is_user_error:
        raise UserError(failure.message)  # `run_to_the_end` closes run.json, as for what the launcher itself refuses
    close(record, "failed", failure.message)
    print_line(f"error: {failure.message}; {next_start(config)}", sys.stderr)
    return 1


def report_stop(stopped: Stopped, config: RunConfig, record: RunRecord | None) -> int:
    """Tell the user what stopped the run and where it resumes, and return the exit code."""
    request, last_step = stopped.request, None
    reason = why(stopped, config.trainer.preemption.grace_s)
    close(record, "stopped", reason)
    if record is not None:
        attempt = record.read()["attempts"][-1]
        last_step = attempt["last_step"]
        if request is None:
            reason = attempt["exit_reason"]  # rank 0 knows what the ranks were asked
        elif last_step is not None and not request.was_too_slow:
            reason += f" after step {last_step}"
    if request is not None and request.was_too_slow:
        print_line(
            f"error: {reason}; {next_start(config)}. Raise trainer.preemption.grace_s to allow more time", sys.stderr
        )
    else:
        print_line(f"{reason[0].upper()}{reason[1:]}; {next_start(config, last_step)}.")
    return stopped.exit_code


def close(record: RunRecord | None, status: EndStatus, reason: str) -> None:
    """Write how the run ended into run.json, unless rank 0 has; where that fails, the reason matters more."""
    if record is not None:
        try:
            record.end_if_running(status, reason)
        except UserError as lost:
            warn(f"{lost}")


def why(stopped: Stopped, grace_s: float) -> str:
    """What ended the ranks, as run.json keeps it."""
    request = stopped.request
    if request is None:
        return "stopped by a signal to a rank"
    if request.was_too_slow:
        limit = f"trainer.preemption.grace_s={grace_s:g} s"
        return f"killed after {request.signal.name} because saving took longer than {limit}"
    if request.immediate is not None:
        second = "a second " if request.immediate is Signals.SIGINT else ""
        return f"stopped immediately by {second}{request.immediate.name}"
    return f"stopped by {request.signal.name}"


def next_start(config: RunConfig, last_step: int | None = None) -> str:
    """Where the same command resumes, as a clause; `last_step` is the last step done, where that is known."""
    try:
        checkpoint = checkpoint_that_suits(config)
    except UserError as error:
        return f"the same command cannot resume: {error}"
    if checkpoint is None:
        return "the same command starts at step 0"
    return f"the same command resumes from {'there' if step_of(checkpoint) == last_step else checkpoint.name}"
