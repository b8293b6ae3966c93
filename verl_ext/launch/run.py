"""Runs training to its end, with restarts; the launcher of the first node writes `run.json`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.lease import hold_lease
from verl_ext.checkpoint.manifest import (
    complete_checkpoints,
    read_complete,
    read_tracker,
    step_of,
    why_incomplete,
)
from verl_ext.checkpoint.resume import contents_to_load, is_of_run
from verl_ext.checkpoint.retention import find_leftovers, find_temporary_files, finite_metric, remove_leftovers
from verl_ext.config.run_config import NOT_IDENTITY, changed_files, changes_validation, config_digest
from verl_ext.config.schema import as_dict, flat
from verl_ext.console import print_line, typed_path, warn
from verl_ext.console_log import recording_console
from verl_ext.data.config import file_list
from verl_ext.data.dataset import sampled_digest
from verl_ext.errors import UserError
from verl_ext.files import hold_run_lock
from verl_ext.launch.configure import is_first_node, resume_candidate
from verl_ext.launch.outcome import Failure, HandledStop, Outcome, Stopped, is_crash, run_with_restarts
from verl_ext.launch.ranks import run_ranks, tell_other_nodes
from verl_ext.launch.report import close, print_run_summary, report
from verl_ext.launch.watcher import watching
from verl_ext.metrics.heartbeat import BEAT_S, send_heartbeats
from verl_ext.metrics.run_record import RunRecord
from verl_ext.model_files import untrained_loss
from verl_ext.processes import StopRequest, StopSignals
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, RunConfig, SFTConfig, read_config

MAY_DIFFER = (*NOT_IDENTITY, "trainer.default_local_dir", "trainer.resume_", "trainer.trace", "recipe", "prepare")
"""Keys that may differ from the settings of a finished run."""
NAMES = ("trainer.project_name", "trainer.experiment_name")
"""Keys without an effect on training."""
LOCK_REMEDY = "wait for it, stop it, or set a different trainer.experiment_name"
"""Advice if another launch is using the run directory."""
MAX_SHOWN = 3
"""Maximum number of changed keys in one line."""


def run_until_finished(
    config: RunConfig,
    signals: StopSignals,
    *,
    restarts: int,
    provenance: Mapping[str, Any],
) -> int:
    """Train, unless this run is already finished; returns the exit code of the command.

    Args:
        restarts: number of restarts in a row without a new checkpoint.
        provenance: what the attempts record about this launch.

    Raises:
        UserError: the input cannot be used.
        StopRequest: a stop signal came before training started.
    """
    run_dir, record = config.trainer.run_dir, RunRecord(config.trainer.run_dir)
    is_first = is_first_node()
    with signals.raising():
        if is_finished(config, record):
            if is_first:
                clean_up_finished_run(run_dir)
            print_finished(config)
            with watching(config, is_first, signals) as watcher:
                return 0 if watcher is None else watcher.finish(signals)
        refuse_other_settings(config, record)
        resume_candidate(config)
        make_run_directory(run_dir)
    with hold_run_lock(run_dir, LOCK_REMEDY) if is_first else nullcontext(False) as is_alone:
        if is_alone:
            with signals.raising():
                remove_leftovers(run_dir, warn)  # first, because this frees space on a full disk
        launch = Launch(config, signals, record if is_first else None, provenance)
        launch.mark_waiting()  # before the watcher starts: the record may still say that a shorter run is finished
        heartbeat = send_heartbeats(run_dir) if is_first else nullcontext()
        name = "launcher" if is_first else f"launcher of node {os.environ['NODE_RANK']}"
        with recording_console(run_dir, name):
            print_start(config)
            print_changes(config)
            with (
                heartbeat,
                launch.recording_refusal(),
                lease_inputs(config),
                watching(config, is_first, signals) as watcher,
            ):
                code = report(launch.run(restarts), config, launch.record)
                return code if code or watcher is None else watcher.finish(signals)


class Launch:
    """The ranks of this node, over all restarts.

    Args:
        record: record of the run; None on nodes other than the first.
        provenance: what the attempts record about this launch.
    """

    def __init__(
        self,
        config: RunConfig,
        signals: StopSignals,
        record: RunRecord | None,
        provenance: Mapping[str, Any],
    ) -> None:
        self.config, self.signals, self.record = config, signals, record
        self.provenance = {**provenance, "heartbeat_s": BEAT_S}
        self.run_dir = config.trainer.run_dir
        self.saved_before = last_checkpoint(self.run_dir)

    def run(self, restarts: int) -> Outcome:
        """Run the ranks until they complete all steps, are stopped, or crash too often."""
        try:
            return run_with_restarts(
                lambda: run_ranks(self.next_config(), self.signals),
                may_restart=lambda outcome: is_crash(outcome) and not self.signals.received,
                progress=lambda: last_checkpoint(self.run_dir),
                announce=self.announce_restart,
                pause=self.pause,
                restarts=restarts,
            )
        except StopRequest as stop:  # while no rank ran
            stopped = Stopped.by(HandledStop(stop.signal, self.signals.immediate))
            tell_other_nodes(self.config, stopped)
            return stopped

    def next_config(self) -> RunConfig:
        """Return the user's configuration; once this launch has saved a checkpoint, one that resumes from it."""
        if last_checkpoint(self.run_dir) == self.saved_before:
            return self.config
        config = deepcopy(self.config)
        config.trainer.resume_mode = "auto"  # even if the first attempt started elsewhere
        return config

    def announce_restart(self, outcome: Outcome, plan: str) -> None:
        """Record the attempt as failed and the run as waiting for the next, and tell the user."""
        assert isinstance(outcome, Failure)
        close(self.record, "failed", outcome.message, is_cause=outcome.exit_code < 0)
        checkpoint = resume_candidate(self.next_config())
        self.mark_waiting()
        print_line(f"{outcome.message}; {plan} from {'step 0' if checkpoint is None else checkpoint.name}")

    def pause(self, seconds: float) -> None:
        """Wait, or raise if a stop signal arrives."""
        with self.signals.raising():
            time.sleep(seconds)

    @contextmanager
    def recording_refusal(self) -> Iterator[None]:
        """Record a `UserError` of the block in `run.json`, then re-raise it."""
        try:
            yield
        except UserError as error:
            if self.record is not None:
                try:
                    self.record.end_refused(str(error))
                except UserError as lost:  # the reason of the refusal is more important
                    warn(f"{lost}")
            raise

    def mark_waiting(self) -> None:
        """Write the run into `run.json` before its ranks start."""
        if self.record is None:
            return
        config = self.next_config()
        first_start, precision = first_start_and_precision(config)
        self.record.mark_waiting(
            launch={**self.provenance, "input_files": input_digests(config)},
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            stage=config.stage,
            recipe=config.recipe,
            config_digest=config_digest(as_dict(self.config)),
            untrained_loss=untrained_loss(str(config.model.partial_pretrain)),
            first_start=first_start.isoformat(timespec="seconds"),
            precision=precision,
        )


def make_run_directory(run_dir: Path) -> None:
    """Create the run directory.

    Raises:
        UserError: it cannot be created; it changed since `check_run_directory`, or the disk is full.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run directory {run_dir.absolute()} cannot be created ({error.strerror}); set "
            "trainer.default_local_dir"
        ) from error


@contextmanager
def lease_inputs(config: RunConfig) -> Iterator[None]:
    """Within the block, keep the rotation of other runs from deleting the checkpoints that this run starts from.

    Raises:
        UserError: rotation has just removed one of them.
    """
    with ExitStack() as stack:
        for checkpoint in input_checkpoints(config):
            try:
                stack.enter_context(hold_lease(checkpoint))
            except FileNotFoundError as error:
                raise UserError(f"{checkpoint} has just been removed; specify a newer checkpoint") from error
        yield


def input_checkpoints(config: RunConfig) -> list[Path]:
    """Return the checkpoints that the settings name as initial weights, and that of another run to resume from.

    A restart reads them again.
    """
    named = [config.model.partial_pretrain, config.model.lora_adapter_path]
    if isinstance(config, BudgetConfig):
        named.append(config.controller.init_from)
    paths = [Path(name).expanduser() for name in named if name is not None]
    found = [path for given in paths for path in (given, given.parent) if step_of(path) is not None and path.is_dir()]
    resumed = resume_candidate(config)
    if resumed is not None and not is_of_run(resumed, config.trainer.run_dir):
        found.append(resumed)
    return [*dict.fromkeys(found)]


def last_checkpoint(run_dir: Path) -> tuple[int, float] | None:
    """Return step and time of the complete checkpoint that the tracker names; None if there is none."""
    tracked, _ = read_tracker(run_dir)
    if tracked is None:
        return None
    try:
        manifest = read_complete(tracked)
    except ValueError:
        return None
    return manifest.step, manifest.time


def first_start_and_precision(config: RunConfig) -> tuple[datetime, str | None]:
    """Return the local time of the first start of the resumed run, and the dtype of its forward pass.

    If the launch starts at step 0, they are the current time and None. If the record has no dtype, it is fp32,
    which matters on CPUs only.
    """
    checkpoint = resume_candidate(config)
    if checkpoint is None:
        return datetime.now(), None
    record = RunRecord(checkpoint.parent)
    try:
        return record.first_start() or datetime.now(), record.read()["precision"] or "fp32"
    except UserError:  # a damaged record is replaced, with a warning
        return datetime.now(), "fp32"


def print_start(config: RunConfig) -> None:
    """Announce the start, because the ranks import and load for a while before they print anything."""
    ranks = config.trainer.n_gpus_per_node
    print_line(
        f"Starting {config.trainer.experiment_name} ({config.stage}) on {ranks} rank{'s' * (ranks > 1)}. "
        "Expect the first step in about 15 s, or a few minutes for a large model."
    )


def print_changes(config: RunConfig) -> None:
    """Name every setting and input file that a resumed run changes; a forgotten override would change one silently."""
    checkpoint = resume_candidate(config)
    if checkpoint is None or not is_of_run(checkpoint, config.trainer.run_dir):
        return
    try:
        changes = changed_settings(config)
        files = changed_files(previous_digests(config.trainer.run_dir), input_digests(config))
    except UserError:  # a damaged config.yaml or run.json is replaced
        return
    changes = {key: change for key, change in changes.items() if key not in NAMES}
    texts = [*_as_text(changes), *(f"the content of {path}" for path in files)]
    contents = contents_to_load(checkpoint, config.trainer, config.optim.class_name)
    if isinstance(config, BudgetConfig) and "extra" in contents:
        note = " (no effect: the saved learning rate applies)"
        texts = [text + note * text.startswith("optim.lr: ") for text in texts]
    if len(texts) > MAX_SHOWN:
        print_line("\n  ".join(["Resuming with changed settings:", *texts]))
    elif texts:
        print_line(f"Resuming with changed settings: {', '.join(texts)}.")
    if "data.val_files" in changes and None in changes["data.val_files"]:
        del changes["data.val_files"]  # there were no validations before, or there will be none
    if files or changes_validation(changes, as_dict(config)["data"]):
        warn_of_incomparable_validations(config, checkpoint)


def warn_of_incomparable_validations(config: RunConfig, checkpoint: Path) -> None:
    """Warn that the best checkpoint may be chosen by different rewards or data, if a validation has been recorded."""
    run_dir, metric = config.trainer.run_dir, config.trainer.checkpoint.best_metric
    if any(finite_metric(manifest, metric) is not None for manifest in complete_checkpoints(run_dir).values()):
        warn(
            f"{metric} is not comparable before and after {checkpoint.name}, because rewards or the evaluated data "
            "have changed, but the best checkpoint is chosen among all checkpoints; set trainer.experiment_name to a "
            "new name to compare only new ones"
        )


def input_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of the files that determine what a validation measures, by path: reward functions and data.

    Skips unreadable files, such as those of a dataset class that reads its data from elsewhere.
    """
    paths: list[str] = []
    if isinstance(config, GRPOConfig):
        from verl_ext.grpo.rewards.functions import parse_reward_functions

        plugins = [spec.plugin for spec in parse_reward_functions(list(config.reward.functions))]
        paths += [plugin.location for plugin in plugins if plugin is not None and plugin.is_file]
    if isinstance(config, GRPOConfig) and config.data.eval_split == "train":
        paths += file_list(config.data.train_files)
    elif isinstance(config, SFTConfig | GRPOConfig):
        paths += file_list(config.data.val_files)
    digests = {}
    for path in paths:
        with suppress(OSError):
            digests[path] = sampled_digest([Path(path).expanduser()])
    return digests


def previous_digests(run_dir: Path) -> dict[str, str]:
    """Return the `input_digests` of the last attempt that trained; empty for runs of earlier versions.

    Raises:
        UserError: the record of the run is damaged.
    """
    trained = [each for each in RunRecord(run_dir).read()["attempts"] if each.get("first_step") is not None]
    return trained[-1].get("input_files", {}) if trained else {}


def changed_settings(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the previous and the new value of each setting that differs from the run's `config.yaml`, by dotted key.

    Raises:
        UserError: the file cannot be read.
    """
    previous, now = flat(read_config(config.trainer.run_dir / "config.yaml")), flat(config)
    return {
        key: (previous[key], now[key])
        for key in sorted(now.keys() & previous.keys())
        if now[key] != previous[key] and not key.startswith(MAY_DIFFER)
    }


def list_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the first changes as text."""
    rest = len(changes) - MAX_SHOWN
    return ", ".join(_as_text(changes)[:MAX_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def _as_text(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{key}: {previous} -> {now}" for key, (previous, now) in changes.items()]


# A run that is already finished


def is_finished(config: RunConfig, record: RunRecord) -> bool:
    """Whether `run.json` says that exactly this configuration has finished."""
    if not has_finished(config, record):
        return False
    digest = config_digest(as_dict(config))
    if record.read()["config_digest"] == digest:
        return True
    path = config.trainer.run_dir / "config.yaml"  # the recorded digest may be of keys of all stages
    return path.is_file() and config_digest(as_dict(read_config(path))) == digest


def has_finished(config: RunConfig, record: RunRecord) -> bool:
    """Whether the run that this launch would resume has finished, with any configuration."""
    try:
        run = record.read()
    except UserError:
        return False  # rank 0 replaces a damaged record, with a warning
    resumes = config.trainer.resume_mode == "auto" and config.trainer.resume_from_path is None
    tracked, _ = read_tracker(config.trainer.run_dir)
    return resumes and run["status"] == "finished" and tracked is not None and why_incomplete(tracked) is None


def refuse_other_settings(config: RunConfig, record: RunRecord) -> None:
    """Refuse to start a finished run with other settings, unless they may make it longer.

    The ranks would train no step, but the run directory would record the new settings.
    """
    path = config.trainer.run_dir / "config.yaml"
    if not has_finished(config, record) or not path.is_file():
        return
    changes = changed_settings(config)
    if not changes or may_be_longer(changes, config.trainer.total_training_steps, record.read()["total_steps"] or 0):
        return
    raise UserError(
        f"{typed_path(path.parent)} is finished, and this command changes settings ({list_changes(changes)}); set "
        "trainer.experiment_name to a new name to train with these settings, or raise trainer.total_training_steps to "
        "train this run longer"
    )


def may_be_longer(changes: Mapping[str, tuple[Any, Any]], total_steps: int | None, steps_done: int) -> bool:
    """Whether a finished run may get more steps.

    Args:
        changes: see `changed_settings`.
        total_steps: `trainer.total_training_steps` of the new configuration.
        steps_done: steps of the finished run.
    """
    if total_steps is not None:
        return total_steps > steps_done
    previous, now = changes.get("trainer.total_epochs", (0, 0))
    return "trainer.total_training_steps" in changes or not isinstance(previous, int) or now > previous


def clean_up_finished_run(run_dir: Path) -> None:
    """Remove leftovers of an interruption, such as a kill during the last rotation, unless another launch is active."""
    if find_leftovers(run_dir) or find_temporary_files(run_dir):
        with suppress(UserError), hold_run_lock(run_dir) as is_alone:
            if is_alone:
                remove_leftovers(run_dir, warn)


def print_finished(config: RunConfig) -> None:
    """Print that the run is finished, how to train longer, and a summary."""
    trainer = config.trainer
    length = "total_epochs" if trainer.total_training_steps is None else "total_training_steps"
    print_line(
        f"This run is finished: {typed_path(trainer.default_local_dir)}. To train longer, raise trainer.{length} (now "
        f"{getattr(trainer, length)}); to start another run, set trainer.experiment_name to a new name."
    )
    print_run_summary(config)
