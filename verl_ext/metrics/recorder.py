"""One call that sends a row of metrics everywhere it is wanted."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.metrics.console import ConsoleLines
from verl_ext.metrics.csv_history import CsvHistory
from verl_ext.metrics.epoch_history import EpochTables
from verl_ext.metrics.event import Event
from verl_ext.metrics.jsonl import METRICS_FILE, MetricsFile
from verl_ext.metrics.log_file import LOG_FILE, LogFile
from verl_ext.metrics.records import EVENTS_FILE, SAMPLES_FILE, RecordsFile, SampleRow
from verl_ext.metrics.sinks import EpochSink, EventSink, Sink, TensorBoardSink, VerlSink, WandbSink
from verl_ext.metrics.wandb_run import open_wandb_run, persistent_run_id

S = TypeVar("S", bound=Sink)
OWN_BACKENDS = ("console", "tensorboard", "wandb")


class MetricsRecorder:
    """Writes rows to `metrics.jsonl`, the CSV tables and the backends asked for; rank 0 alone makes one.

    `metrics.jsonl` is the record: failing to write it is an error. Any other place that fails is named in one
    warning and left out from then on.
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
    ) -> None:
        """Open everything.

        Args:
            run_dir: the run directory; created when missing.
            attempt: which start of the run this is, from 1.
            backends: `console`, `tensorboard`, `wandb`, or any other that verl's `Tracking` supports.
            project: the project's name in the trackers.
            experiment: the run's name in the project.
            config: the resolved configuration, shown by the trackers.
            total_steps: optimizer steps of the whole run.
            log_every: steps between two console lines.
            by_epoch: the CSV tables have a row for each epoch, from `log_epoch`; otherwise they have a row for each
                step.
            log_file: what the console shows is also written to `train.log`.

        Raises:
            UserError: a backend is unknown, `log_every` is below 1, or `metrics.jsonl` cannot be written.
        """
        require_known_backends(backends)
        run_dir = Path(run_dir)
        self._file = MetricsFile(run_dir / METRICS_FILE, attempt)
        self._samples = RecordsFile(run_dir / SAMPLES_FILE, attempt)
        self._events = RecordsFile(run_dir / EVENTS_FILE, attempt)
        self._sinks: list[Sink] = []
        self._add("csv", partial(EpochTables if by_epoch else CsvHistory, run_dir))
        if log_file:
            self._add("log file", partial(LogFile, run_dir / LOG_FILE, total_steps=total_steps, log_every=log_every))
        if "console" in backends:
            self._sinks.append(ConsoleLines(total_steps=total_steps, log_every=log_every))
        if "tensorboard" in backends:
            self._add("tensorboard", partial(TensorBoardSink, run_dir / "tensorboard"))
        if "wandb" in backends:
            self._add("wandb", partial(_open_wandb, run_dir, project, experiment, config))
        others = [name for name in dict.fromkeys(backends) if name not in OWN_BACKENDS]
        for name in others:  # one by one, so that one that fails does not take the others with it
            self._add(name, partial(VerlSink, name, project, experiment, config, run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row everywhere.

        Args:
            step: optimizer steps since the run began.
            metrics: value by metric name, reduced over all ranks.

        Raises:
            UserError: a value is not a number, or `metrics.jsonl` cannot be written.
        """
        row = self._file.append(step, metrics)
        self._hand_to(self._sinks, lambda sink: sink.write(row))

    def log_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Write what an epoch came to: a row of the CSV tables, `Train/...` and `Val/...` in the trackers, a line.

        Args:
            kind: Train or Val.
            row: by the `COLUMNS` of `epoch_history`.
        """
        takers = [sink for sink in self._sinks if isinstance(sink, EpochSink)]
        self._hand_to(takers, lambda sink: sink.write_epoch(kind, row))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write some samples to `samples.jsonl`, and as a table to W&B.

        Args:
            step: they are of.
            rows: column to value; the same columns in each.

        Raises:
            UserError: `samples.jsonl` cannot be written.
        """
        self._samples.append(step, rows)
        takers = [sink for sink in self._sinks if isinstance(sink, WandbSink)]
        self._hand_to(takers, lambda sink: sink.write_samples(step, rows))

    def log_event(self, event: Event) -> None:
        """Write what is said of the run to `events.jsonl`, the console and, from a warning on, W&B's alerts.

        Raises:
            UserError: `events.jsonl` cannot be written.
        """
        self._events.append(event.step, [event.row()])
        takers = [sink for sink in self._sinks if isinstance(sink, EventSink)]
        self._hand_to(takers, lambda sink: sink.write_event(event))

    def close(self, exit_code: int = 0) -> None:
        """Flush and close everything; a second call does nothing.

        Args:
            exit_code: 0 for a run that ended well, `STOPPED_EXIT_CODE` for one that goes on later; shown by W&B.
        """
        self._file.close()
        self._samples.close()
        self._events.close()
        self._hand_to(self._sinks, lambda sink: sink.close(exit_code))
        self._sinks.clear()

    def _hand_to(self, sinks: Sequence[S], give: Callable[[S], None]) -> None:
        """Give something to some places; one that fails is left out from then on."""
        for sink in list(sinks):
            try:
                give(sink)
            except Exception as error:  # a tracker may raise anything, and none is worth a training run
                self._sinks.remove(sink)
                _warn_off(sink.name, error)

    def _add(self, name: str, open_sink: Callable[[], Sink | None]) -> None:
        try:
            sink = open_sink()
        except Exception as error:
            _warn_off(name, error)
        else:
            self._sinks.extend([sink] if sink is not None else [])


def verl_backends() -> list[str]:
    """The backends of the installed verl, read from its source: importing verl takes seconds.

    Raises:
        RuntimeError: this verl lists them in another way.
    """
    spec = importlib.util.find_spec("verl")
    if spec is not None and spec.submodule_search_locations:
        source = Path(spec.submodule_search_locations[0], "utils", "tracking.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "supported_backend":
                return list(ast.literal_eval(node.value))
    raise RuntimeError("verl's tracking.py has no list supported_backend; install verl==0.7.0")


def require_known_backends(backends: Sequence[str]) -> None:
    """Refuse backends that neither this package nor verl has.

    Args:
        backends: of `trainer.logger`.

    Raises:
        UserError: the first of them that nobody knows.
    """
    others = [name for name in backends if name not in OWN_BACKENDS]
    known = sorted({*OWN_BACKENDS, *verl_backends()}) if others else []
    for name in others:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"take some of {', '.join(known)}"
            raise UserError(f"trainer.logger names '{name}', which is not a metrics backend; {hint}")


def _open_wandb(run_dir: Path, project: str, experiment: str, config: Mapping[str, Any]) -> WandbSink | None:
    run = open_wandb_run(
        project=project,
        name=experiment,
        directory=run_dir,
        config=config,
        run_id=persistent_run_id(run_dir),
        group=experiment,
        job_type="train",
    )
    return None if run is None else WandbSink(run)


def _warn_off(name: str, error: Exception) -> None:
    warn(f"metrics no longer go to {name}: {one_line(error)}; {METRICS_FILE} still has every row")
