"""W&B runs that never prompt, work without a network, and resume after restarts."""

from __future__ import annotations

import json
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl_ext.console import print_line, typed_path, warn
from verl_ext.errors import STOPPED_EXIT_CODE, one_line
from verl_ext.files import replace_file
from verl_ext.metrics.jsonl import KEY_COLUMNS, HealthEvent, MetricsRow, SampleRow
from verl_ext.metrics.sinks import MetricsSink, epoch_tags
from verl_ext.metrics.wandb_dashboard import WandbDashboard

if TYPE_CHECKING:
    from wandb import Run

RUN_ID_FILE = "wandb_run_id.txt"

# Seconds that W&B may wait for its server. Its defaults, 90 s at the start and unlimited at the end, would use up the
# grace period of a preempted machine. Data that was not uploaded stays on disk for `wandb sync`.
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0

_NO_NETWORK_MODES = ("offline", "disabled")
Mode = Literal["online", "offline", "shared", "disabled"]

# A .wandb file is a header and LevelDB log blocks. A block has chunks of records: checksum, length, kind, content.
_FILE_HEADER_BYTES, _BLOCK_BYTES = 7, 32 * 1024
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4
_TAIL_BYTES = 64 * _BLOCK_BYTES
_SETTLED_S = 5.0
"""Seconds without a change after which W&B's service no longer writes a file."""


class LoggedRows(NamedTuple):
    """What the newest offline file of a W&B run has.

    Attributes:
        num_steps: number of W&B's own steps.
        last: the last row of metrics, with `global_step` and `attempt`; empty if there is none.
    """

    num_steps: int = 0
    last: Mapping[str, Any] = {}


class WandbSink(MetricsSink):
    """An open W&B run, from `open_wandb_run`.

    Args:
        earlier: rows of earlier starts of the run, for the dashboard.
    """

    name = "wandb"

    def __init__(self, run: Run, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._run, self._dashboard = run, WandbDashboard(run, earlier)

    def log_row(self, row: MetricsRow) -> None:
        """Log the row with `global_step` and `attempt`; W&B's own step only counts rows."""
        self._log(row)
        self._dashboard.add(row.step, row.metrics)
        if not row.metrics.keys().isdisjoint(("val/loss", "eval/reward_total_mean")):
            self._dashboard.log()

    def resume(self, logged: LoggedRows, earlier: Iterable[Mapping[str, Any]]) -> None:
        """Continue W&B's steps, and log the rows that a kill cut off from the file of the last attempt.

        Args:
            earlier: rows of earlier starts of the run.
        """
        if self._run.offline:
            self._run.log({}, step=logged.num_steps)  # each offline attempt would count from 0
        for row in rows_after(logged.last, earlier):
            metrics = {name: value for name, value in row.items() if name not in KEY_COLUMNS}
            self._log(MetricsRow(row["step"], row["attempt"], row["time"], metrics))

    def _log(self, row: MetricsRow) -> None:
        self._run.log({**row.metrics, "global_step": row.step, "attempt": row.attempt})

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Log an epoch; the x-axis of its charts is the epoch."""
        tags = epoch_tags(split, row)
        for tag in tags:
            self._run.define_metric(tag, step_metric="epoch")
        self._run.log({**tags, "epoch": int(row["epoch"])})

    def log_event(self, event: HealthEvent) -> None:
        """Send an alert, which W&B forwards by mail or chat, for warnings and alarms."""
        from wandb.sdk.wandb_alerts import AlertLevel

        levels = {"warning": AlertLevel.WARN, "alarm": AlertLevel.ERROR}
        if event.level in levels:
            self._run.alert(event.name, f"step {event.step}: {event.text}", levels[event.level])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Log samples as the table `train/samples` or `eval/samples`."""
        import wandb

        columns = list(rows[0])
        table = wandb.Table(columns=["step", *columns], data=[[step, *(row[name] for name in columns)] for row in rows])
        self._run.log({f"{rows[0]['split']}/samples": table, "global_step": step})

    def close(self, exit_code: int = 0) -> None:
        """Finish the run: as finished for 0, as preempted for `STOPPED_EXIT_CODE`, otherwise as failed."""
        try:
            self._dashboard.log(now=True)
        finally:  # also if the charts cannot be written to a full disk
            if exit_code == STOPPED_EXIT_CODE:
                self._run.mark_preempting()
            self._run.finish(exit_code=exit_code)


def open_wandb_run(
    *,
    project: str,
    name: str,
    directory: Path,
    config: Mapping[str, Any],
    run_id: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
    proxy: str | None = None,
) -> Run | None:
    """Start or continue a W&B run: online if a key is configured, otherwise offline.

    `WANDB_MODE` and W&B's settings files are respected. Log rows that contain `global_step`, without `step=`:
    `global_step` is the x-axis of every chart, so a run that resumes at an earlier step loses no rows.

    Args:
        directory: parent of the directory `wandb` for W&B's files, which is created if it is missing.
        config: the run's configuration.
        run_id: id of the run to continue, if it exists; None starts a new run.
        group: group of the run in W&B.
        job_type: type of the run, such as `train` or `eval`.
        proxy: address of the HTTPS proxy; None for `HTTPS_PROXY`.

    Returns:
        The run. If it cannot start online, it starts offline, with a warning. None, with a warning, if W&B is not
        installed or cannot start at all.
    """
    settings = {"root_dir": str(directory), "run_group": group, "run_job_type": job_type, "https_proxy": proxy}
    arguments = {"project": project, "name": name, "config": dict(config), "id": run_id, "resume": "allow"}
    logging.raiseExceptions = False  # on a full disk, each line of W&B's debug.log would print a traceback
    try:
        Path(directory, "wandb").mkdir(parents=True, exist_ok=True)  # W&B writes to a temporary folder if it is missing
        run = _start(settings, arguments)
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        _announce(run, Path(directory))
    except Exception as error:  # a failing tracker must not stop training
        warn(f"W&B is off, because it cannot start: {one_line(error)}")
        return None
    return run


def fill_wandb_run(run: Run | None, log: Callable[[Run], None], results_in: str | Path) -> None:
    """Log results to a new W&B run and finish it; a failure is one warning.

    Args:
        run: from `open_wandb_run`; None does nothing.
        results_in: location of the results, for the warning.
    """
    if run is None:
        return
    try:
        with run:
            log(run)
    except Exception as error:  # W&B raises errors of many types, and the results are already on disk
        warn(f"logging to W&B failed ({one_line(error)}); the results are in {results_in}")


def persistent_run_id(run_dir: Path) -> str:
    """Return the W&B id that all attempts of a run share; the first call creates it in `wandb_run_id.txt`.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = Path(run_dir) / RUN_ID_FILE
    run_id = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not run_id:
        run_id = secrets.token_hex(4)
        replace_file(path, [run_id + "\n"])
    return run_id


# Files of earlier offline attempts


def repair_offline_files(directory: Path, run_id: str) -> LoggedRows:
    """Repair the files that killed attempts left, because `wandb sync` uploads no attempt after a damaged file.

    W&B writes blocks of 32 KiB, so that a kill usually cuts a record off. The rest of that record is removed, and so is
    a file that does not even have the description of the run.

    Args:
        directory: parent of the directory `wandb`.

    Returns:
        The rows in the newest file; none if the newest attempt was online, or if its file may still be written.
    """
    paths = Path(directory, "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    logged = LoggedRows()
    for path in sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-")):
        if not path.parent.name.startswith("offline-"):
            logged = LoggedRows()
            continue
        try:
            if time.time() - path.stat().st_mtime < _SETTLED_S:
                logged = LoggedRows()
            else:
                logged = _repair(path) or logged
        except Exception as error:  # W&B works without old files
            warn(f"cannot repair {path}, so `wandb sync` may skip later attempts: {one_line(error)}")
    return logged


def _repair(path: Path) -> LoggedRows | None:
    """Remove an incomplete record from the end of a file; return its rows, or None if nothing was left."""
    size = path.stat().st_size
    start = max(0, size - _TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    records, end = _read_records(path, start)
    if not records:  # a record longer than the tail
        start = 0
        records, end = _read_records(path, start)
    if start == 0 and len(records) < 2:  # the second one describes the run
        path.unlink()
        return None
    if end < size:
        os.truncate(path, end)
    return _logged_rows(records)


def _read_records(path: Path, start: int) -> tuple[list[bytes], int]:
    """Return the complete records of a file from a block on, and the offset of the end of the last one."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    records: list[bytes] = []
    parts: list[bytes] | None = None
    position = end = 0 if start else _FILE_HEADER_BYTES
    while position + _CHUNK_HEADER.size <= len(data):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        if room < _CHUNK_HEADER.size or kind == 0:  # the rest of the block is empty
            position += room
            continue
        begin, position = position + _CHUNK_HEADER.size, position + _CHUNK_HEADER.size + length
        if position > len(data):
            break
        if kind in (_WHOLE, _FIRST):
            parts = []
        if parts is not None:  # else the record began before `start`
            parts.append(data[begin:position])
        if kind in (_WHOLE, _LAST):
            end = position
            records += [b"".join(parts)] if parts is not None else []
            parts = None
    return records, start + end


def _logged_rows(records: Sequence[bytes]) -> LoggedRows:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # a generated class

    num_steps = 0
    for content in reversed(records):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            num_steps = max(num_steps, row.get("_step", -1) + 1)
            if "attempt" in row:
                return LoggedRows(num_steps, row)
    return LoggedRows(num_steps)


def rows_after(last: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of `metrics.jsonl` after the one that W&B logged last; none if that one is not among them."""
    found: list[Mapping[str, Any]] | None = None
    for row in rows if last else ():
        is_last = (row["step"], row["attempt"]) == (last.get("global_step"), last.get("attempt"))
        if is_last and row.keys() - KEY_COLUMNS <= last.keys():  # a step has rows of training, validation and saves
            found = []
        elif found is not None:
            found.append(row)
    return found or []


def _start(settings: dict[str, Any], arguments: dict[str, Any]) -> Run:
    import wandb

    mode = _choose_mode()
    try:
        return _init(mode, settings, arguments)
    except Exception as error:
        if mode in _NO_NETWORK_MODES:
            raise
        warn(f"W&B cannot start online and runs offline instead: {one_line(error)}")
        wandb.teardown()  # its service process still reserves the id of the failed run
        return _init("offline", settings, arguments)


def _choose_mode() -> Mode:
    import wandb

    requested = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
    # dryrun and run are W&B's former names
    configured = "offline" if requested == "dryrun" else "online" if requested == "run" else requested
    if configured in _NO_NETWORK_MODES:
        return configured
    # Looks where `wandb.init` would look (environment, netrc, settings), but never prompts.
    return configured if _has_credentials() else "offline"


def _has_credentials() -> bool:
    import wandb

    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        warn(f"W&B runs offline, because its credentials are not usable: {one_line(error)}")
        return False


def _init(mode: Mode, settings: dict[str, Any], arguments: dict[str, Any]) -> Run:
    import wandb

    full = wandb.Settings(
        silent=True,
        init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT_S)),
        finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT_S)),
        **{name: value for name, value in settings.items() if value is not None},
    )
    return wandb.init(mode=mode, settings=full, **arguments)


def _announce(run: Run, directory: Path) -> None:
    # W&B itself is silenced; users need only this part of its output.
    if run.offline:
        runs = typed_path(directory / "wandb")
        print_line(f"W&B run {run.id} is offline; upload it with: wandb sync {runs}/offline-run-*-{run.id}")
    elif run.url:
        print_line(f"W&B run {run.id}: {run.url}")
