"""W&B runs that never prompt, work without a network, and resume after restarts."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_ext.console import print_line, warn
from verl_ext.errors import STOPPED_EXIT_CODE, one_line
from verl_ext.files import replace_file
from verl_ext.metrics.jsonl import KEY_COLUMNS, HealthEvent, MetricsRow, SampleRow
from verl_ext.metrics.sinks import MetricsSink, epoch_tags
from verl_ext.metrics.wandb_dashboard import WandbDashboard
from verl_ext.metrics.wandb_files import LoggedRows, rows_after, sync_command

if TYPE_CHECKING:
    from wandb import Run

RUN_ID_FILE = "wandb_run_id.txt"

# Seconds that W&B may wait for its server. Its defaults, 90 s at the start and unlimited at the end, would use up the
# grace period of a preempted machine. Data that was not uploaded stays on disk for `wandb sync`.
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0

_NO_NETWORK_MODES = ("offline", "disabled")
Mode = Literal["online", "offline", "shared", "disabled"]


class WandbSink(MetricsSink):
    """An open W&B run, from `open_wandb_run`.

    Args:
        earlier: rows of earlier starts of the run, for the dashboard.
    """

    name = "wandb"

    def __init__(self, run: Run, earlier: Iterable[Mapping[str, Any]]) -> None:
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
        warn(f"W&B is disabled, because it could not start: {one_line(error)}")
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
        print_line(f"W&B run {run.id} is offline; upload it with: {sync_command(directory, f'offline-run-*-{run.id}')}")
    elif run.url:
        print_line(f"W&B run {run.id}: {run.url}")
