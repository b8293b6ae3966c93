"""One run from waiting to its end, with its restarts; the launcher of the first node keeps run.json."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.manifest import read_tracker, why_incomplete
from verl_ext.checkpoint.retention import find_leftovers, find_temporary_files, remove_leftovers
from verl_ext.config.run_config import NOT_IDENTITY, config_digest
from verl_ext.config.schema import as_dict, flat
from verl_ext.console import print_line, typed_path, warn
from verl_ext.errors import UserError
from verl_ext.files import hold_run_lock
from verl_ext.launch.configure import checkpoint_that_suits, make_run_directory
from verl_ext.launch.grpo_model import holding_model
from verl_ext.launch.outcome import Failure, Outcome, Request, Stopped
from verl_ext.launch.ranks import RANK_MODULE, run_ranks
from verl_ext.launch.report import report
from verl_ext.launch.restarts import FIRST_PAUSE_S, going_on, last_save, run_with_restarts
from verl_ext.launch.summary import print_run_summary
from verl_ext.launch.watcher import watching
from verl_ext.metrics.run_record import RunRecord
from verl_ext.model_files import untrained_loss
from verl_ext.processes import StopRequest, StopSignals
from verl_ext.trainer.stages import RunConfig, read_config

NOT_ASKED = (*NOT_IDENTITY, "trainer.default_local_dir", "trainer.resume_", "trainer.trace", "recipe", "prepare")
"""Keys that may differ from those that a finished run was trained with."""
MOST_SHOWN = 3
"""Changed keys in a message."""


def run_to_the_end(
    config: RunConfig,
    signals: StopSignals,
    *,
    restarts: int = 0,
    module: str = RANK_MODULE,
    first_pause_s: float = FIRST_PAUSE_S,
) -> int:
    """Train unless the same run is already finished.

    Args:
        config: the resolved configuration.
        signals: what the launcher is asked.
        restarts: how often to start again after a crash without a new checkpoint, see `run_with_restarts`.
        module: what every rank runs, see `run_ranks`.
        first_pause_s: seconds before the first restart.

    Returns:
        The exit code of the command.

    Raises:
        UserError: the input cannot be used.
        StopRequest: the launcher was asked to stop before it had begun.
    """
    run_dir = Path(config.trainer.default_local_dir)
    record = RunRecord(run_dir)
    leads = int(os.environ.get("NODE_RANK", "0")) == 0
    with signals.raising():
        if is_finished(config, record):
            if leads:
                tidy_finished_run(run_dir)
            tell_that_it_is_finished(config)
            with watching(config, leads, signals) as watcher:
                return watcher.finish(signals)
        refuse_other_settings(config, record)
        checkpoint_that_suits(config)
        make_run_directory(run_dir)
    with hold_run_lock(run_dir) if leads else nullcontext(False) as is_alone:
        if is_alone:
            with signals.raising():
                remove_leftovers(run_dir, warn)  # first: on a full disk it makes the room for what is written next
        launch = Launch(config, signals, record if leads else None, module)
        launch.mark_waiting()  # before the watcher looks: the record may still say that a shorter run is finished
        tell_that_it_starts(config)
        with launch.refusing(), holding_model(config), watching(config, leads, signals) as watcher:
            code = report(launch.run(restarts, first_pause_s), config, launch.record)
            return watcher.finish(signals) if code == 0 else code


def tidy_finished_run(run_dir: Path) -> None:
    """Remove what an interruption left, as a kill during the last rotation does, unless another launch is at it."""
    if find_leftovers(run_dir) or find_temporary_files(run_dir):
        with suppress(UserError), hold_run_lock(run_dir) as is_alone:
            if is_alone:
                remove_leftovers(run_dir, warn)


class Launch:
    """The ranks of this node, over all restarts.

    Args:
        config: the resolved configuration.
        signals: what the launcher is asked.
        record: of the run; None on nodes other than the first.
        module: what every rank runs.
    """

    def __init__(self, config: RunConfig, signals: StopSignals, record: RunRecord | None, module: str) -> None:
        self.config, self.signals, self.record, self.module = config, signals, record, module
        self.run_dir = Path(config.trainer.default_local_dir)
        self.saved_before = last_save(self.run_dir)

    def run(self, restarts: int, first_pause_s: float) -> Outcome:
        """Run the ranks until they are done, are stopped, or crash once too often."""
        try:
            return run_with_restarts(
                lambda: run_ranks(self.next_config(), self.signals, self.module),
                lambda: last_save(self.run_dir),
                self.announce_restart,
                restarts=restarts,
                signals=self.signals,
                first_pause_s=first_pause_s,
            )
        except StopRequest as stop:  # while no rank ran
            return Stopped.by(Request(stop.signal, self.signals.immediate))

    def next_config(self) -> RunConfig:
        """As the user gave it until this launch has saved something, which the next attempt goes on from."""
        return self.config if last_save(self.run_dir) == self.saved_before else going_on(self.config)

    def announce_restart(self, failure: Failure, plan: str) -> None:
        """Record the attempt as failed and the run as waiting for the next, and tell the user."""
        if self.record is not None:
            self.record.end_if_running("failed", failure.message)
        checkpoint = checkpoint_that_suits(self.next_config())
        self.mark_waiting()
        print_line(f"{failure.message}; {plan} from {'step 0' if checkpoint is None else checkpoint.name}")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within the block, a `UserError` is entered into run.json before it is raised."""
        try:
            yield
        except UserError as error:
            if self.record is not None:
                try:
                    self.record.end_refused(str(error))
                except UserError as lost:  # why the launch was refused matters more
                    warn(f"{lost}")
            raise

    def mark_waiting(self) -> None:
        """Enter the run into run.json before its ranks start."""
        if self.record is not None:
            self.record.mark_waiting(
                project=self.config.trainer.project_name,
                experiment=self.config.trainer.experiment_name,
                stage=self.config.stage,
                recipe=self.config.recipe,
                config_digest=config_digest(as_dict(self.config)),
                untrained_loss=untrained_loss(str(self.config.model.partial_pretrain)),
                first_start=first_start(self.next_config()).isoformat(timespec="seconds"),
                precision=recorded_precision(self.next_config()),
            )


def first_start(config: RunConfig) -> datetime:
    """Local time at which the run that a launch resumes was first started; now if it starts at step 0."""
    checkpoint = checkpoint_that_suits(config)
    try:
        known = None if checkpoint is None else RunRecord(checkpoint.parent).first_start()
    except UserError:
        known = None  # a damaged record is put aside, with a warning
    return known or datetime.now()


def recorded_precision(config: RunConfig) -> str | None:
    """Number type of the forward pass of the run that a launch resumes; None if it starts at step 0.

    Records of earlier versions have none: on CPUs, which alone ask, those runs computed in fp32.
    """
    checkpoint = checkpoint_that_suits(config)
    if checkpoint is None:
        return None
    try:
        return RunRecord(checkpoint.parent).read()["precision"] or "fp32"
    except UserError:
        return "fp32"


def is_finished(config: RunConfig, record: RunRecord) -> bool:
    """Whether run.json says that exactly this configuration ran to its end."""
    if not has_finished(config, record):
        return False
    digest = config_digest(as_dict(config))
    if record.read()["config_digest"] == digest:
        return True
    path = config.trainer.run_dir / "config.yaml"  # an earlier release computed the digest from keys of all stages
    return path.is_file() and config_digest(as_dict(read_config(path))) == digest


def has_finished(config: RunConfig, record: RunRecord) -> bool:
    """Whether the run that this launch would resume ran to its end, with whatever configuration."""
    try:
        run = record.read()
    except UserError:
        return False  # start_attempt puts a damaged record aside and says so
    trainer = config.trainer
    asked = trainer.resume_mode == "auto" and trainer.resume_from_path is None
    tracked, _ = read_tracker(Path(trainer.default_local_dir))
    return asked and run["status"] == "finished" and tracked is not None and why_incomplete(tracked) is None


def refuse_other_settings(config: RunConfig, record: RunRecord) -> None:
    """Refuse to start a finished run with settings that it was not trained with, unless they may make it longer.

    Its ranks would train no step, and the run directory would claim the new settings.

    Raises:
        UserError: the run has finished, and no setting could add a step.
    """
    path = Path(config.trainer.default_local_dir) / "config.yaml"
    if not has_finished(config, record) or not path.is_file():
        return
    former, now = flat(read_config(path)), flat(config)
    changed = {key for key in now.keys() & former.keys() if now[key] != former[key] and not key.startswith(NOT_ASKED)}
    if not changed or may_be_longer(changed, former, now, record.read()["total_steps"] or 0):
        return
    shown = ", ".join(f"{key} from {former[key]} to {now[key]}" for key in sorted(changed)[:MOST_SHOWN])
    raise UserError(
        f"{typed_path(path.parent)} is finished, and this command changes {shown}; set trainer.experiment_name to a "
        "new name to train with these settings, or raise trainer.total_training_steps to train this run longer"
    )


def may_be_longer(changed: Collection[str], former: Mapping[str, Any], now: Mapping[str, Any], steps_done: int) -> bool:
    """Whether changed settings may add steps to a finished run.

    Args:
        changed: dotted keys.
        former: value by key of the finished run.
        now: the same of this launch.
        steps_done: of the finished run.
    """
    steps, epochs = now["trainer.total_training_steps"], "trainer.total_epochs"
    if steps is not None:
        return steps > steps_done
    longer = not isinstance(former.get(epochs), int) or now[epochs] > former[epochs]
    return longer or any(key.startswith(("data.train", "data.datasets")) for key in changed)


def tell_that_it_starts(config: RunConfig) -> None:
    """Say so: the ranks import and load for a while before they print anything."""
    ranks = config.trainer.n_gpus_per_node
    print_line(
        f"Starting {config.trainer.experiment_name} ({config.stage}) on {ranks} rank{'s' * (ranks > 1)}. "
        "Expect the first step in about 15 s, or a few minutes for a large model."
    )


def tell_that_it_is_finished(config: RunConfig) -> None:
    """Say so, how to train longer, and what the run has achieved."""
    trainer = config.trainer
    length = "total_epochs" if trainer.total_training_steps is None else "total_training_steps"
    print_line(
        f"This run is finished: {typed_path(trainer.default_local_dir)}. To train longer, raise trainer.{length} (now "
        f"{getattr(trainer, length)}); to start another run, set trainer.experiment_name to a new name."
    )
    print_run_summary(config)
