"""Records one start of a run on rank 0: run.json, metrics, health findings and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.config.provenance import config_provenance
from verl_ext.config.schema import as_dict, to_yaml
from verl_ext.console import warn
from verl_ext.distributed import on_rank_zero
from verl_ext.errors import Stop, UserError, one_line
from verl_ext.files import replace_file
from verl_ext.health.context import REWARDED
from verl_ext.health.rule import Finding
from verl_ext.health.watch import HealthMonitor
from verl_ext.metrics.jsonl import HealthEvent, SampleRow, is_training_row
from verl_ext.metrics.recorder import MetricsRecorder
from verl_ext.metrics.run_record import EndStatus, RunRecord
from verl_ext.metrics.sinks import ProgressBar
from verl_ext.metrics.timing import startup
from verl_ext.trainer.device import device_names
from verl_ext.trainer.stages import RunConfig


@dataclass
class RunLogger:
    """Records one start of a run, as a context around training; on ranks other than 0 every method does nothing.

    Attributes:
        config: the resolved configuration; written to `config.yaml` in the run directory.
        first_step: step of the checkpoint from which this start resumes.
        total_steps: step at which the run is finished.
        steps_per_epoch: number of training steps in a pass over the data.
        world_size: number of ranks.
        is_main: whether this is rank 0.
        precision: dtype of the forward pass.
        num_samples: numbers of training and validation samples; the latter is 0 without validation.
        health: the health rules; None if they are disabled, or if a rule or a record of earlier starts is broken.
    """

    config: RunConfig
    first_step: int
    total_steps: int
    steps_per_epoch: int
    world_size: int
    is_main: bool
    precision: str
    num_samples: tuple[int, int]
    health: HealthMonitor | None = None

    def __enter__(self) -> RunLogger:
        on_rank_zero(self._open)
        return self

    def _open(self) -> None:
        startup.mark("checkpoint")
        self.last_step, run_dir = self.first_step, self.config.trainer.run_dir
        self.record = RunRecord(run_dir)
        number = self.record.start_attempt(
            first_step=self.first_step,
            world_size=self.world_size,
            total_steps=self.total_steps,
            precision=self.precision,
            provenance={
                "device_names": device_names(self.config.trainer.device),
                **config_provenance(self.config, run_dir / "config.yaml"),
            },
        )
        self.health = self._open_health(run_dir)  # reads the changes that this attempt has just recorded
        self.recorder = self._open_recorder(number)  # may fail, and config.yaml then stays unchanged
        replace_file(run_dir / "config.yaml", [to_yaml(self.config)])
        train, val = self.num_samples
        self.recorder.log_note(f"Loaded {train:,} training and {val:,} validation samples.")
        self.bar = ProgressBar(self.total_steps, initial=self.first_step)
        startup.mark("trackers")

    def _open_recorder(self, number: int) -> MetricsRecorder:
        return MetricsRecorder(
            run_dir=self.config.trainer.run_dir,
            attempt=number,
            backends=list(self.config.trainer.logger),
            project=self.config.trainer.project_name,
            experiment=self.config.trainer.experiment_name,
            config=as_dict(self.config),
            total_steps=self.total_steps,
            log_every=self.config.trainer.log_every,
            by_epoch=self.config.stage == "budget",
            log_file=self.config.stage in REWARDED,
            wandb_proxy=self.config.trainer.wandb_proxy,
            first_step=self.first_step,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row of metrics to all destinations; a step may have several rows (training, validation, saving)."""
        if not self.is_main or not metrics:
            return
        self.recorder.log(step, metrics)
        if is_training_row(metrics):
            self.last_step = step
            self.bar.update(metrics)
            startup.mark("first_step")
            if seconds := startup.take():
                self.recorder.log(step, {f"time/start/{part}_s": value for part, value in seconds.items()})
        else:
            startup.mark("validation")
        for found in self._findings(step, metrics):
            self.recorder.log_event(HealthEvent(step, found.rule, found.level.word, found.sentence))

    def _open_health(self, run_dir: Path) -> HealthMonitor | None:
        """Load the health rules with the records of earlier starts."""
        if not self.config.health.enabled:
            return None
        try:
            steps = self.first_step, self.total_steps, self.steps_per_epoch
            return HealthMonitor.for_run(self.config.health, as_dict(self.config), run_dir, *steps)
        except Exception as error:  # a broken file or rule must not stop training
            warn(f"health rules are disabled for this run: {_reason_and_fix(error)}")
            return None

    def _findings(self, step: int, metrics: Mapping[str, float]) -> Sequence[Finding]:
        """Findings of the health rules; an error in the history or the records disables the rules, not the run."""
        try:
            return [] if self.health is None else self.health.check(step, metrics)
        except Exception as error:  # a broken rule must not stop training
            self.health = None
            warn(f"health rules are disabled from step {step} on: {_reason_and_fix(error)}")
            return []

    @property
    def stop_rule(self) -> str | None:
        """The rule of `health.stop_on` that has found a problem; None if there is none."""
        return None if self.health is None else self.health.stop_rule

    def log_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Write a row of epoch metrics; see `MetricsRecorder.log_epoch`."""
        if self.is_main:
            self.recorder.log_epoch(kind, row)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write some samples."""
        if self.is_main and rows:
            self.recorder.log_samples(step, rows)

    def log_sample_tokens(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the tokens of some samples."""
        if self.is_main:
            self.recorder.log_sample_tokens(step, rows)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.is_main:
            return
        self.bar.close()
        status, reason, exit_code = self._outcome(error)
        closed = self.recorder.close(exit_code)
        try:
            self.record.end_attempt(status, self.last_step, reason, closed)
        except UserError as lost:
            if error is None:
                raise
            warn(str(lost))  # the error that ended training matters more

    def _outcome(self, error: BaseException | None) -> tuple[EndStatus, str, int]:
        """Return status and reason for run.json, and the exit code for the trackers."""
        if error is None:
            return "finished", "all steps completed", 0
        if isinstance(error, Stop):
            return "stopped", f"stopped by {error} after step {self.last_step}", error.exit_code
        if isinstance(error, UserError):
            return "failed", str(error), error.exit_code
        return "failed", one_line(error), 1


def _reason_and_fix(error: Exception) -> str:
    """Why the health rules cannot be checked, and what to do; a `UserError` already says it."""
    if isinstance(error, UserError):
        return str(error)
    return f"{one_line(error)}; fix the rule or file, or set health.enabled=false"
