"""Opening a W&B run that never asks a question, never needs a network, and is one run over all restarts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_ext.console import print_line, typed_path, warn
from verl_ext.errors import one_line
from verl_ext.files import replace_file

if TYPE_CHECKING:
    from wandb import Run

RUN_ID_FILE = "wandb_run_id.txt"

# Seconds W&B may wait for its server; its own defaults are 90 at the start and for ever at the end, where a machine
# that is being taken away would lose its grace period. What was not uploaded stays on disk for `wandb sync`.
_INIT_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0

_NO_NETWORK_MODES = ("offline", "disabled")
Mode = Literal["online", "offline", "shared", "disabled"]


def open_wandb_run(
    *,
    project: str,
    name: str,
    directory: Path,
    config: Mapping[str, Any],
    run_id: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
) -> Run | None:
    """Start or continue a W&B run: online when a key is configured, offline otherwise.

    `WANDB_MODE` and W&B's settings files are respected. Rows are to be logged with `global_step` in them and without
    `step=`: `global_step` is the axis of every chart, so a run that resumes at an earlier step loses none.

    Args:
        project: the W&B project.
        name: the run's name in the project.
        directory: W&B's files go to `directory/wandb`; created when missing.
        config: what W&B shows as the run's configuration; `trainer.wandb_proxy` is used as HTTPS proxy, as in verl.
        run_id: continues the run of this id if there is one; None starts a new one.
        group: runs of one group are shown together.
        job_type: what the run does, such as `train` or `eval`.

    Returns:
        The run, or None, after one warning, when W&B is missing or cannot start. A run that cannot start online is
        started offline, with a warning.
    """
    settings = {"root_dir": str(directory), "run_group": group, "run_job_type": job_type, **_proxy(config)}
    arguments = {"project": project, "name": name, "config": dict(config), "id": run_id, "resume": "allow"}
    try:
        Path(directory, "wandb").mkdir(parents=True, exist_ok=True)  # W&B writes to a temporary folder if it is missing
        run = _start(settings, arguments)
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        _announce(run, Path(directory))
    except Exception as error:  # whatever a tracker's trouble is, it is no reason not to train
        warn(f"W&B is off, because it cannot start: {one_line(error)}")
        return None
    return run


def persistent_run_id(run_dir: Path) -> str:
    """Return the W&B id that all attempts of a run share, choosing it at the first call.

    Args:
        run_dir: the run directory; the id is kept in its `wandb_run_id.txt`.

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
    mode = _choose_mode()
    try:
        return _init(mode, settings, arguments)
    except Exception as error:
        if mode in _NO_NETWORK_MODES:
            raise
        warn(f"W&B cannot start online and runs offline instead: {one_line(error)}")
        _forget_failed_start()
        return _init("offline", settings, arguments)


def _forget_failed_start() -> None:
    import wandb

    # W&B's service process keeps the id of the failed run as taken.
    wandb.teardown()


def _choose_mode() -> Mode:
    import wandb

    asked = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
    configured = "offline" if asked == "dryrun" else "online" if asked == "run" else asked  # W&B's former words
    if configured in _NO_NETWORK_MODES:
        return configured
    # Looks where `wandb.init` would (environment, netrc, settings), but does not ask when there is nothing to find.
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
    # W&B itself is silenced; this is the one thing of all it says that a person needs.
    if run.offline:
        runs = typed_path(directory / "wandb")
        print_line(f"W&B run {run.id} is offline; upload it with: wandb sync {runs}/offline-run-*-{run.id}")
    elif run.url:
        print_line(f"W&B run {run.id}: {run.url}")


def _proxy(config: Mapping[str, Any]) -> dict[str, Any]:
    trainer = config.get("trainer")
    return {"https_proxy": trainer.get("wandb_proxy")} if isinstance(trainer, Mapping) else {}
