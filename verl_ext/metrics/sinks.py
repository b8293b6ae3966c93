"""The places besides the run's own files where rows are shown: TensorBoard, W&B, and what verl's Tracking serves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verl_ext.errors import STOPPED_EXIT_CODE
from verl_ext.metrics.epoch_history import tags_of
from verl_ext.metrics.event import Event
from verl_ext.metrics.records import SampleRow
from verl_ext.metrics.row import Row

if TYPE_CHECKING:
    from wandb import Run


class Sink(Protocol):
    """A place that rows are sent to."""

    name: str

    def write(self, row: Row) -> None:
        """Take one row; may raise anything."""

    def close(self, exit_code: int = 0) -> None:
        """Hand over what is still held, and let go."""


@runtime_checkable
class EpochSink(Sink, Protocol):
    """A place that is also told what an epoch came to."""

    def write_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Take the figures of an epoch; `kind` is Train or Val, `row` has the `COLUMNS` of `epoch_history`."""


@runtime_checkable
class EventSink(Sink, Protocol):
    """A place that is also told what is said of the run."""

    def write_event(self, event: Event) -> None:
        """Take an event."""


class TensorBoardSink:
    """Event files in one directory for all attempts."""

    # Not verl's adapter: it holds points back for up to two minutes, which a kill would lose.

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        """Open a new event file in `directory`, beside those of earlier attempts."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, row: Row) -> None:
        """Write the row's metrics as scalars at its step."""
        for name, value in row.metrics.items():
            self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def write_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Write an epoch's figures as scalars, with epochs as the axis."""
        for tag, value in tags_of(kind, row).items():
            self._writer.add_scalar(tag, value, int(row["epoch"]))
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """An open W&B run."""

    name = "wandb"

    def __init__(self, run: Run) -> None:
        """Log to `run`, which `open_wandb_run` made."""
        self._run = run

    def write(self, row: Row) -> None:
        """Log the row with `global_step` and `attempt` in it; W&B's own step only counts rows."""
        self._run.log({**row.metrics, "global_step": row.step, "attempt": row.attempt})

    def write_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Log an epoch's figures, with epochs as the axis of their charts."""
        tags = tags_of(kind, row)
        for tag in tags:
            self._run.define_metric(tag, step_metric="epoch")
        self._run.log({**tags, "epoch": int(row["epoch"])})

    def write_event(self, event: Event) -> None:
        """Send an alert, which W&B passes on by mail or chat; a notice is none."""
        from wandb.sdk.wandb_alerts import AlertLevel

        levels = {"warning": AlertLevel.WARN, "alarm": AlertLevel.ERROR}
        if event.level in levels:
            self._run.alert(event.name, f"step {event.step}: {event.text}", levels[event.level])

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log samples as a table under `train/samples`."""
        import wandb

        columns = list(rows[0])
        table = wandb.Table(columns=["step", *columns], data=[[step, *(row[name] for name in columns)] for row in rows])
        self._run.log({"train/samples": table, "global_step": step})

    def close(self, exit_code: int = 0) -> None:
        """Finish the run.

        Args:
            exit_code: 0 shows the run as finished, `STOPPED_EXIT_CODE` as preempted, anything else as failed.
        """
        if exit_code == STOPPED_EXIT_CODE:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)


class VerlSink:
    """A tracker that verl's `Tracking` serves and this package does not."""

    def __init__(self, name: str, project: str, experiment: str, config: Mapping[str, Any], run_dir: Path) -> None:
        """Start the tracker.

        Args:
            name: one of verl's `Tracking.supported_backend`.
            project: the project's name in the tracker.
            experiment: the run's name in the project.
            config: what the tracker shows as the run's configuration.
            run_dir: where the `file` tracker writes unless `VERL_FILE_LOGGER_PATH` says otherwise.
        """
        from verl.utils.tracking import Tracking

        self.name = name
        with _file_logger_path(run_dir):
            self._tracking: Tracking | None = Tracking(project, experiment, [name], dict(config))

    def write(self, row: Row) -> None:
        """Log the row's metrics at its step."""
        if self._tracking is not None:
            self._tracking.log(data=dict(row.metrics), step=row.step)

    def close(self, exit_code: int = 0) -> None:
        """Finish the tracker."""
        self._tracking = None  # verl finishes its trackers when the object goes


@contextmanager
def _file_logger_path(run_dir: Path) -> Iterator[None]:
    # verl's file logger empties its file on opening, so each attempt gets a file of its own.
    variable = "VERL_FILE_LOGGER_PATH"
    if variable in os.environ:
        yield
        return
    number = 1 + len(list(run_dir.glob("verl_file_logger_*.jsonl")))
    os.environ[variable] = str(run_dir / f"verl_file_logger_{number}.jsonl")
    try:
        yield
    finally:
        del os.environ[variable]
