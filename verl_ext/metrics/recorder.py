"""Sends each row of metrics to `metrics.jsonl` and to every sink."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.metrics.csv_tables import EpochTables, StepTables
from verl_ext.metrics.jsonl import (
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLE_TOKENS_FILE,
    SAMPLES_FILE,
    HealthEvent,
    JsonlFile,
    MetricsFile,
    SampleRow,
    iter_metrics,
)
from verl_ext.metrics.sinks import LOG_FILE, ConsoleSink, LogFileSink, MetricsSink, TensorBoardSink, VerlTrackerSink
from verl_ext.metrics.wandb_files import repair_offline_files
from verl_ext.metrics.wandb_sink import WandbSink, open_wandb_run, persistent_run_id

OUR_BACKENDS = ("console", "tensorboard", "wandb")


class MetricsRecorder:
    """Records the metrics, samples and events of a run, on rank 0.

    If one of its `.jsonl` files cannot be written, the run stops. If a sink fails, such as the CSV tables or a tracker,
    it is dropped with one warning.

    Args:
        run_dir: the run directory; created if it is missing.
        attempt: number of the attempt (start) of the run, from 1.
        backends: `console`, `tensorboard`, `wandb`, or any other that verl's `Tracking` supports.
        project: the project's name in the trackers.
        experiment: the run's name in the project.
        config: the resolved configuration, for the trackers.
        total_steps: number of training steps of the whole run.
        log_every: steps between two console lines.
        by_epoch: whether the CSV tables have one row per epoch, from `log_epoch`, instead of one per step.
        log_file: whether to write the console's lines also to `train.log`.
        wandb_proxy: see `open_wandb_run`.
        first_step: step from which the attempt starts.

    Raises:
        UserError: a backend is unknown, or `metrics.jsonl` cannot be written.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        attempt: int,
        backends: Sequence[str],
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        total_steps: int,
        log_every: int = 10,
        by_epoch: bool = False,
        log_file: bool = False,
        wandb_proxy: str | None = None,
        first_step: int = 0,
    ) -> None:
        require_known_backends(backends)
        run_dir = Path(run_dir)
        self._metrics = MetricsFile(run_dir / METRICS_FILE, attempt)
        self._samples = JsonlFile(run_dir / SAMPLES_FILE, attempt)
        self._sample_tokens = JsonlFile(run_dir / SAMPLE_TOKENS_FILE, attempt)
        self._events = JsonlFile(run_dir / EVENTS_FILE, attempt)
        self._sinks: list[MetricsSink] = []
        self._add("csv", partial(EpochTables if by_epoch else StepTables, run_dir))
        if log_file:
            path = run_dir / LOG_FILE
            self._add("log file", partial(LogFileSink, path, total_steps=total_steps, log_every=log_every))
        if "console" in backends:
            self._sinks.append(ConsoleSink(total_steps=total_steps, log_every=log_every))
        if "tensorboard" in backends:
            self._add("tensorboard", partial(TensorBoardSink, run_dir / "tensorboard", first_step))
        if "wandb" in backends:
            self._add("wandb", partial(_open_wandb, run_dir, project, experiment, config, wandb_proxy))
        others = [name for name in dict.fromkeys(backends) if name not in OUR_BACKENDS]
        for name in others:  # one sink each, so that a failure drops only one
            self._add(name, partial(VerlTrackerSink, name, project, experiment, config, run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row.

        Args:
            metrics: value by metric name, reduced over all ranks.

        Raises:
            UserError: a value is not a number, or `metrics.jsonl` cannot be written.
        """
        row = self._metrics.append(step, metrics)
        self._send(lambda sink: sink.log_row(row))

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Record the means of an epoch; see `MetricsSink.log_epoch`."""
        self._send(lambda sink: sink.log_epoch(split, row))

    def log_note(self, text: str) -> None:
        """Say something about the run on the console and in `train.log`."""
        self._send(lambda sink: sink.log_note(text))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record some samples of a step and split in `samples.jsonl` and W&B; all rows have the same columns.

        Raises:
            UserError: `samples.jsonl` cannot be written.
        """
        self._samples.append(step, rows)
        self._send(lambda sink: sink.log_samples(step, rows))

    def log_sample_tokens(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the tokens of some samples of a step in `sample_tokens.jsonl`.

        Raises:
            UserError: the file cannot be written.
        """
        self._sample_tokens.append(step, rows)

    def log_event(self, event: HealthEvent) -> None:
        """Record a finding of the health rules in `events.jsonl`, on the console and, for warnings and alarms, in W&B.

        Raises:
            UserError: `events.jsonl` cannot be written.
        """
        self._events.append(event.step, [event.record()])
        self._send(lambda sink: sink.log_event(event))

    def close(self, exit_code: int = 0) -> list[str]:
        """Flush and close everything; a second call does nothing.

        Args:
            exit_code: exit code of the run, for W&B.

        Returns:
            Names of the destinations that were closed without a failure.
        """
        for file in (self._metrics, self._samples, self._sample_tokens, self._events):
            file.close()
        self._send(lambda sink: sink.close(exit_code))
        closed = [sink.name for sink in self._sinks]
        self._sinks.clear()
        return closed

    def _send(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # a tracker may raise anything, and must not stop a training run
                self._sinks.remove(sink)
                _warn_dropped(sink.name, error)

    def _add(self, name: str, open_sink: Callable[[], MetricsSink | None]) -> None:
        try:
            sink = open_sink()
        except Exception as error:
            _warn_dropped(name, error)
        else:
            self._sinks.extend([sink] if sink is not None else [])


def _warn_dropped(name: str, error: Exception) -> None:
    warn(f"metrics no longer go to {name}: {one_line(error)}; {METRICS_FILE} still has every row")


def _open_wandb(
    run_dir: Path, project: str, experiment: str, config: Mapping[str, Any], proxy: str | None
) -> WandbSink | None:
    run_id = persistent_run_id(run_dir)
    logged = repair_offline_files(run_dir, run_id)
    run = open_wandb_run(
        project=project,
        name=experiment,
        directory=run_dir,
        config=config,
        run_id=run_id,
        group=experiment,
        job_type="train",
        proxy=proxy,
    )
    if run is None:
        return None
    sink = WandbSink(run, iter_metrics(run_dir / METRICS_FILE))
    sink.resume(logged, iter_metrics(run_dir / METRICS_FILE))
    return sink


def require_known_backends(backends: Sequence[str]) -> None:
    """Refuse a name in `trainer.logger` that is neither our backend nor verl's.

    Raises:
        UserError: a name is unknown.
    """
    others = [name for name in backends if name not in OUR_BACKENDS]
    known = sorted({*OUR_BACKENDS, *verl_backends()}) if others else []
    for name in others:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"use some of {', '.join(known)}"
            raise UserError(f"trainer.logger names '{name}', which is not a metrics backend; {hint}")


def verl_backends() -> list[str]:
    """Return the backends of the installed verl, read from its source because importing verl takes seconds.

    Raises:
        RuntimeError: this version of verl lists them differently.
    """
    spec = importlib.util.find_spec("verl")
    if spec is not None and spec.submodule_search_locations:
        source = Path(spec.submodule_search_locations[0], "utils", "tracking.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "supported_backend":
                return list(ast.literal_eval(node.value))
    raise RuntimeError("verl's tracking.py has no list supported_backend; install verl==0.7.0")
