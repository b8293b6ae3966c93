"""Destinations of metrics: the console, `train.log`, TensorBoard, and verl's trackers."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_ext.console import progress_bar
from verl_ext.files import LineWriter
from verl_ext.metrics.jsonl import HealthEvent, MetricsRow, SampleRow, is_training_row
from verl_ext.metrics.registry import CONSOLE_FORMATS

LOG_FILE = "train.log"
_EVAL_REWARD = "eval/reward_total_mean"
"""Metric that every row of a validation with rewards has."""
_LINE_WIDTH = 120
"""Maximum width of a line; rewards that do not fit are omitted."""
_LENGTH, _LATENCY = "seq_completion_len_mean", "latency_ms_mean"
_ON_THE_BAR = {
    "loss": ("train/loss", "{:.4f}"),
    "reward": ("train/reward_total_mean", "{:.4f}"),
    "acc": ("train/accuracy_mean", "{:.4f}"),
    "ms": (f"train/{_LATENCY}", "{:.1f}"),
}
"""Metric and format of each value after the progress bar."""


class MetricsSink:
    """A destination of metrics. Subclasses override the methods that they support; the others do nothing.

    If a method raises, the recorder drops the sink.
    """

    name: str
    """Name of the sink in warnings."""

    def log_row(self, row: MetricsRow) -> None:
        """Log one row of metrics."""

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Log the means of an epoch; `split` is Train or Val, `row` has the `EPOCH_COLUMNS`."""

    def log_event(self, event: HealthEvent) -> None:
        """Log a finding of the health rules."""

    def log_note(self, text: str) -> None:
        """Log a sentence about the run."""

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log some samples of one step and split; all rows have the same columns."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close; `exit_code` is the exit code of the run."""


def epoch_tags(split: str, row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an epoch for trackers: `Train/Loss`, `Train/Reward_Mean` and so on."""
    values = {name: value for name, value in row.items() if name != "epoch" and not math.isnan(value)}
    return {f"{split}/{name.title()}": value for name, value in values.items()}


class TensorBoardSink(MetricsSink):
    """Writes event files into one directory, one file per attempt.

    Args:
        first_step: step from which this attempt starts; TensorBoard hides later points of earlier attempts.
    """

    # Not verl's adapter, which buffers points for up to two minutes; a kill would lose them.

    name = "tensorboard"

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # step 0 has the validation before training, which a start at step 0 repeats
        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else 0)

    def log_row(self, row: MetricsRow) -> None:
        """Write the metrics as scalars at the row's step."""
        for name, value in row.metrics.items():
            self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Write an epoch as scalars; their x-axis is the epoch."""
        for tag, value in epoch_tags(split, row).items():
            self._writer.add_scalar(tag, value, int(row["epoch"]))
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        """Close the event file."""
        self._writer.close()


def drop_tensorboard_errors() -> None:
    """Keep an `OSError` in TensorBoard's thread, such as a full disk, from printing; the next `flush` raises it."""
    previous = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        is_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (is_tensorboard and isinstance(failure.exc_value, OSError)):
            previous(failure)

    threading.excepthook = report


class VerlTrackerSink(MetricsSink):
    """A tracker of verl's `Tracking`, such as `mlflow`, `swanlab` or `file`.

    Args:
        name: name in `trainer.logger`.
        run_dir: directory for the `file` tracker, unless `VERL_FILE_LOGGER_PATH` is set.
    """

    def __init__(self, name: str, project: str, experiment: str, config: Mapping[str, Any], run_dir: Path) -> None:
        from verl_ext.verl_api import Tracking

        self.name = name
        with _file_logger_path(run_dir):
            self._tracking: Tracking | None = Tracking(project, experiment, [name], dict(config))

    def log_row(self, row: MetricsRow) -> None:
        """Log the metrics at the row's step."""
        if self._tracking is not None:
            self._tracking.log(data=dict(row.metrics), step=row.step)

    def close(self, exit_code: int = 0) -> None:
        """Finish the tracker."""
        self._tracking = None  # verl finishes its trackers when the object is deleted


@contextmanager
def _file_logger_path(run_dir: Path) -> Iterator[None]:
    # verl's file logger truncates its file when it opens it, so each attempt gets its own file.
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


# The console and train.log


class ConsoleSink(MetricsSink):
    """Prints a line every `log_every` steps, at the last step, and for each validation, epoch and event.

    Args:
        total_steps: number of training steps of the whole run.
        log_every: steps between two lines, at least 1.
        show: receives each line; the default prints it above a progress bar.
    """

    name = "console"

    def __init__(self, *, total_steps: int, log_every: int, show: Callable[[str], object] = tqdm.write) -> None:
        self._total_steps, self._log_every, self._show = total_steps, log_every, show
        self._first: MetricsRow | None = None

    def log_row(self, row: MetricsRow) -> None:
        """Print the row if it is due."""
        if is_training_row(row.metrics):
            self._first = self._first or row
            if row.step % self._log_every == 0 or row.step == self._total_steps:
                self._show(self._line([*_training_parts(row), self._eta(row)], row))
        if "val/loss" in row.metrics:
            self._show(self._line(_loss_validation_parts(row), row))
        if _EVAL_REWARD in row.metrics:
            self._show(self._line(_reward_validation_parts(row), row))

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Print the means of an epoch."""
        self._show(epoch_line(split, row))

    def log_event(self, event: HealthEvent) -> None:
        """Print a finding of the health rules."""
        self._show(f"step {event.step}/{self._total_steps} | {event.level}: {event.name}: {event.text}")

    def log_note(self, text: str) -> None:
        """Print the sentence."""
        self._show(text)

    def _line(self, parts: list[str], row: MetricsRow) -> str:
        return " | ".join([f"step {row.step}/{self._total_steps}", *filter(None, parts)])

    def _eta(self, row: MetricsRow) -> str:
        # From the wall-clock time of this attempt, which includes validation and saving; the first step sets the start.
        if self._first is None or row.step <= self._first.step:
            return ""
        seconds_per_step = (row.time - self._first.time) / (row.step - self._first.step)
        minutes, seconds = divmod(round(seconds_per_step * (self._total_steps - row.step)), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}"


class LogFileSink(ConsoleSink):
    """Appends the console's lines to a file, each with its time.

    Raises:
        OSError: the file cannot be opened.
    """

    name = "log file"

    def __init__(self, path: Path, *, total_steps: int, log_every: int) -> None:
        super().__init__(total_steps=total_steps, log_every=log_every, show=self._write_line)
        self._writer = LineWriter(path)

    def close(self, exit_code: int = 0) -> None:
        """Close the file."""
        self._writer.close()

    def _write_line(self, text: str) -> None:
        self._writer.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} - INFO - {text}")


class ProgressBar:
    """A progress bar over the steps of a run; without a terminal, the console's lines suffice."""

    def __init__(self, total_steps: int, initial: int) -> None:
        self._bar = progress_bar(total=total_steps, initial=initial, desc="training", unit="steps", lines=False)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Advance by one step and show its loss, reward, accuracy and latency if logged."""
        shown = {word: form.format(metrics[name]) for word, (name, form) in _ON_THE_BAR.items() if name in metrics}
        try:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        except OSError:  # the terminal was closed; the run must still be saved
            self._bar.disable = True

    def close(self) -> None:
        """Leave the bar as is and release the line of the terminal."""
        self._bar.close()


def epoch_line(split: str, row: Mapping[str, float]) -> str:
    """Return the console line of an epoch."""
    parts = [] if math.isnan(row["loss"]) else [f"loss {row['loss']:.4f}"]
    parts += [f"{name} {row[f'{name}_mean']:.4f} (std {row[f'{name}_std']:.4f})" for name in ("reward", "accuracy")]
    parts.append(f"latency {row['latency_mean']:.2f} ms (std {row['latency_std']:.2f} ms)")
    parts.append(f"over budget {row['budget_violation_rate']:.1%}")
    return f"{split} epoch {row['epoch']:.0f}: {', '.join(parts)}"


def _training_parts(row: MetricsRow) -> list[str]:
    if f"train/{_LATENCY}" in row.metrics:  # the stage budget
        middle = ["train/accuracy_mean", f"train/{_LATENCY}"]
    elif "train/kl" not in row.metrics and row.metrics.get("train/update_kl"):  # 0 with one update per step
        middle = [f"train/{_LENGTH}", "train/update_kl"]
    else:
        middle = [f"train/{_LENGTH}", "train/kl"]
    last = ["train/lr(1e-3)", "train/grad_norm", "throughput/train/tokens_per_s"]
    missing = "reward" if "train/samples_without_reward" in row.metrics else "token"
    loss = _part(row, "train/loss") or f"no {missing} to train on"
    return [loss, *(_part(row, name) for name in ("train/reward_total_mean", *middle, *last))]


def _loss_validation_parts(row: MetricsRow) -> list[str]:
    return [_part(row, name) for name in ("val/loss", "val/perplexity", "time/val/step_s")]


def _reward_validation_parts(row: MetricsRow) -> list[str]:
    total, seconds = _part(row, _EVAL_REWARD), _part(row, "time/eval/step_s")
    if f"eval/{_LATENCY}" in row.metrics:  # the stage budget
        of_budget = ("eval/accuracy_mean", f"eval/{_LATENCY}", "eval/budget_violation_mean")
        return [total, *(_part(row, name) for name in of_budget), seconds]
    length = _part(row, f"eval/{_LENGTH}")
    reward_name = re.compile(r"eval/(?!reward_total_|seq_)(\w+)_mean")
    found = {name[1]: value for key, value in row.metrics.items() if (name := reward_name.fullmatch(key))}
    rewards = [f"{name} {value:.3f}" for name, value in found.items()] if len(found) > 1 else []
    while rewards and len(" | ".join([total, *rewards, length, seconds])) > _LINE_WIDTH - len("step 10000/10000 | "):
        rewards.pop()
    return [total, *rewards, length, seconds]


def _part(row: MetricsRow, name: str) -> str:
    if name not in row.metrics:
        return ""
    return CONSOLE_FORMATS[name].format(row.metrics[name] * (1e-3 if name.endswith("(1e-3)") else 1.0))
