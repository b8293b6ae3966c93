"""Small programs that real torchrun starts in place of the trainer: `python -m tests.ranks.small_ranks CONFIG`.

Ranks communicate through files in the run directory, and none lives longer than `LIFETIME_S`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from verl_ext.checkpoint.manifest import TRACKER, Manifest
from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.stages import read_config

LIFETIME_S = 120
RANK = int(os.environ.get("RANK", "0"))


def save(run_dir: Path, step: int) -> None:
    """Write a checkpoint that the launcher regards as complete."""
    directory = run_dir / f"global_step_{step}"
    directory.mkdir(exist_ok=True)
    manifest = Manifest(step, world_size=int(os.environ["WORLD_SIZE"]), config_digest="", files={}, time=time.time())
    (directory / "manifest.json").write_text(manifest.to_json())
    (run_dir / TRACKER).write_text(str(step))


def listen() -> list[int]:
    """Collect stop signals in the returned list."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIFETIME_S
    while not is_so():
        if time.monotonic() > end:
            sys.exit("a small rank waited in vain")
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def say_ready(run_dir: Path) -> None:
    path = run_dir / f"ready_{RANK}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)  # visible only when complete


def stop_when_one_is_asked(run_dir: Path, attempt: int) -> int:
    asked, flag, record = listen(), run_dir / "one_was_asked", RunRecord(run_dir)
    if RANK == 0:
        record.start_attempt(first_step=0, world_size=2, total_steps=20)
    say_ready(run_dir)
    wait_for(lambda: bool(asked) or flag.exists())
    flag.touch()
    if RANK == 0:
        time.sleep(float(os.environ.get("SMALL_SAVE_S", "0")))
        save(run_dir, 7)
        record.end_attempt("stopped", 7, "stopped by SIGUSR1 after step 7")
        (run_dir / "saved").touch()
    wait_for((run_dir / "saved").exists)
    return STOPPED_EXIT_CODE


def ignore_everything(run_dir: Path, attempt: int) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    say_ready(run_dir)
    time.sleep(LIFETIME_S)
    return 0


def crash_when_asked(run_dir: Path, attempt: int) -> int:
    asked = listen()
    say_ready(run_dir)
    wait_for(lambda: bool(asked))
    if RANK == 1:
        return 1
    wait_for(lambda: has_ended(int((run_dir / "ready_1").read_text())))  # rank 1 is the first to end
    return STOPPED_EXIT_CODE


def finish_when_asked(run_dir: Path, attempt: int) -> int:
    asked = listen()
    say_ready(run_dir)
    wait_for(lambda: bool(asked))
    return 0


def crash_twice(run_dir: Path, attempt: int) -> int:
    return 1 if RANK == 1 and attempt <= 2 else 0


def fail_first_on_second_node(run_dir: Path, attempt: int) -> int:
    """The other ranks wait as in a collective, and end only when their launcher ends them."""
    if attempt > 1:
        return 0
    say_ready(run_dir)
    if RANK == 3:
        wait_for(lambda: all((run_dir / f"ready_{rank}").exists() for rank in range(4)))
        wait_for((run_dir / "fail").exists)
        return refuse(run_dir, attempt) if (run_dir / "fail").read_text() == "refuse" else 1
    time.sleep(LIFETIME_S)
    return 0


def save_and_crash_twice(run_dir: Path, attempt: int) -> int:
    if RANK == 0:
        save(run_dir, 10 * attempt)
        (run_dir / f"saved_{attempt}").touch()
    wait_for((run_dir / f"saved_{attempt}").exists)
    return crash_twice(run_dir, attempt)


def refuse(run_dir: Path, attempt: int) -> int:
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": "the data are no good"}))
    return USER_ERROR_EXIT_CODE


def main() -> int:
    """Record the attempt and run the function that the environment names."""
    config = read_config(Path(sys.argv[1]))
    run_dir = Path(config.trainer.default_local_dir)
    attempts = run_dir / f"attempts_of_{RANK}"
    with attempts.open("a") as file:
        file.write(config.trainer.resume_mode + "\n")
    return globals()[os.environ["SMALL_RANKS"]](run_dir, len(attempts.read_text().splitlines()))


if __name__ == "__main__":
    sys.exit(main())
