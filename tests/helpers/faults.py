"""Kills, stops and failing saves of an SFT run, which integration tests sample and campaigns repeat."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import (
    NUM_STEPS,
    Hold,
    SFTRun,
    assert_resumes,
    assert_undisturbed,
    end_of,
    kill_launcher,
)
from tests.helpers.processes import WAIT_S, ranks_of, wait_until
from verl_ext.checkpoint.manifest import Manifest, damaged_files, has_export
from verl_ext.errors import STOPPED_EXIT_CODE

# ---- SIGKILL at a point of the checkpoint protocol -------------------------------------------------------------------

ANY: tuple[int, ...] = ()
"""One rank, chosen at random."""
SAVE = "verl_ext.checkpoint.save"
SHARDS = {f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)}


@dataclass(frozen=True)
class Point:
    """A point of the checkpoint protocol in the save of step 4, when step 2 is saved.

    Attributes:
        hold: the call at which the rank waits.
        names: the checkpoint directories at this point, without `global_step_`.
        tracker: the content of the tracker file at this point.
        overrides: recipe overrides.
        is_in_commit: whether rank 0 alone passes it.
    """

    hold: Hold
    names: set[str]
    tracker: str = "2"
    overrides: tuple[str, ...] = ()
    is_in_commit: bool = False


POINTS = {
    "before staging": Point(Hold(SAVE, "CheckpointWriter.prepare", "global_step_4"), {"2"}),
    "staging": Point(Hold("verl_ext.checkpoint.staging", "CpuStager.stage", call=2), {"2", "4.tmp"}),
    "shard writes": Point(Hold(SAVE, "DigestingFile.write", "4.tmp/optim", when="after", call=20), {"2", "4.tmp"}),
    "export": Point(
        Hold("verl_ext.checkpoint.hf_export", "ExportWriter.write_rows", "global_step_4.tmp", call=5), {"2", "4.tmp"}
    ),
    "before the manifest": Point(Hold(SAVE, "write_manifest", "global_step_4.tmp"), {"2", "4.tmp"}, is_in_commit=True),
    "before the rename": Point(Hold(SAVE, "os.rename", "global_step_4.tmp"), {"2", "4.tmp"}, is_in_commit=True),
    "before the tracker": Point(Hold(SAVE, "write_tracker", call=2), {"2", "4"}, is_in_commit=True),
    "rotation": Point(
        Hold("verl_ext.checkpoint.retention", "shutil.rmtree", "global_step_2.removing"),
        {"2.removing", "4"},
        tracker="4",
        overrides=("trainer.max_ckpt_to_keep=1",),
        is_in_commit=True,
    ),
}


def assert_killed_run_resumes(
    name: str,
    victims: tuple[int, ...],
    resumes_from: int,
    undisturbed: SFTRun,
    quickstart: Path,
    directory: Path,
    *overrides: str,
    seed: int | None = None,
) -> None:
    """Kill ranks of a run at a point and check that the same command resumes without any loss.

    Args:
        name: key of `POINTS`.
        victims: the ranks, or `ANY`.
        resumes_from: step of the checkpoint from which the second start resumes.
        undisturbed: the same run without interruption.
        quickstart: directory of the `quickstart` fixture.
        directory: an empty one.
        overrides: recipe overrides.
        seed: random seed for choosing the rank; None chooses differently in each call.
    """
    victims = victims or (random.Random(seed).randrange(2),)
    run = SFTRun(quickstart, directory / "run", *POINTS[name].overrides, *overrides)
    printed = kill_at(name, victims, run, directory)
    assert f"global_step_{resumes_from}" in printed
    assert_resumes(run, undisturbed, resumes_from)


def kill_at(name: str, victims: tuple[int, ...], run: SFTRun, directory: Path) -> str:
    """Hold a run at a point, kill ranks there, and return the error output of the command."""
    point = POINTS[name]
    print(f"killed {name}: ranks {victims}")
    # Only rank 0 passes the points of the commit. It is held there, and its sibling may be the victim.
    rank = 0 if point.is_in_commit else victims[0]
    with run.held(replace(point.hold, rank=rank), directory) as held:
        ranks = held.ranks()
        assert_is_at(name, run, rank)
        for victim in victims:
            ranks[victim].kill()
        result = held.release()
    assert result.returncode == 1, result.stderr
    deaths = [f"rank {victim} (process {ranks[victim].pid}) was killed by SIGKILL" for victim in victims]
    assert any(death in result.stderr for death in deaths), result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    # A rank 0 that outlives its sibling completes the commit.
    assert run.names() == (point.names if rank in victims else {"2", "4"})
    return result.stderr


def assert_is_at(name: str, run: SFTRun, rank: int) -> None:
    """Check by the files that this rank is held at the point of that name."""
    point = POINTS[name]
    assert run.names() == point.names
    assert run.tracker() == point.tracker
    unfinished = run.run_dir / "global_step_4.tmp"
    sizes = {path.name: path.stat().st_size for path in unfinished.glob("*.pt")}
    before = {path.name: path.stat().st_size for path in run.run_dir.glob("global_step_2/*.pt")}
    own = f"optim_world_size_2_rank_{rank}.pt"
    if name == "staging":
        assert f"model_world_size_2_rank_{rank}.pt" not in sizes  # the other rank may have begun to write
    if name == "shard writes":
        assert 0 < sizes[own] < before[own]
    if name == "export":
        assert sizes[own] == before[own]
        assert (unfinished / "huggingface/model.safetensors").exists()
    if name.startswith("before the"):
        assert (unfinished / "manifest.json").exists() == (name == "before the rename")
    if name in ("before the manifest", "before the rename"):
        assert {shard: sizes[shard] for shard in SHARDS} == {shard: before[shard] for shard in SHARDS}


# ---- SIGKILL at any moment -------------------------------------------------------------------------------------------


def assert_random_kills_lose_nothing(
    rng: random.Random, max_kills: int, undisturbed: SFTRun, quickstart: Path, directory: Path
) -> int:
    """Kill each start of a run at a random moment until it finishes; check that nothing is lost.

    Args:
        rng: chooses when and which process to kill.
        max_kills: the maximum number of kills; the start after them is not killed.
        undisturbed: the same run without interruption.
        quickstart: directory of the `quickstart` fixture.
        directory: a new one.

    Returns:
        The number of kills.
    """
    directory.mkdir()
    run, num_kills = SFTRun(quickstart, directory / "run", "trainer.save_freq=1"), 0
    while num_kills < max_kills and killed_at_random(rng, run, directory / f"output_{num_kills}") != 0:
        num_kills += 1
    if num_kills == max_kills:
        run.finish()
    starts = [attempt["first_step"] for attempt in run.attempts() if attempt["first_step"] is not None]
    assert starts == sorted(starts), "a start resumed from before an earlier one"
    assert run.record()["status"] == "finished"
    assert_undisturbed(run, undisturbed, starts[-1])
    return num_kills


def killed_at_random(rng: random.Random, run: SFTRun, output: Path) -> int:
    """Start a run, SIGKILL its launcher or a rank during the start or some steps later; the command's exit code."""
    num_steps, victim = rng.randint(0, 2), rng.choice(["launcher", "rank 0", "rank 1"])
    delay_s, before = rng.uniform(0, 0.5 if num_steps else 2), run.last_logged()
    with output.open("w") as file:
        process = run.popen(stdout=file, stderr=file)
    wait_until(lambda: process.poll() is not None or run.last_logged() >= before + num_steps)
    print(f"kill of {victim} {delay_s:.2f} s after step {before + num_steps}", end="", flush=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    rank = ranks_of_live(process).get(int(victim[-1])) if victim != "launcher" else None
    if rank is None:  # or the ranks have not started yet
        kill_launcher(process)
    else:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            rank.kill()
    print(f": exit code {process.wait(WAIT_S)}, step {run.last_logged()}")
    return process.returncode


def ranks_of_live(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks of a launcher that may end at any moment."""
    try:
        return ranks_of(process.pid)
    except psutil.NoSuchProcess:
        return {}


# ---- requests to stop ------------------------------------------------------------------------------------------------


def assert_stop_loses_no_step(
    number: signal.Signals, receiver: str, override: str, undisturbed: SFTRun, quickstart: Path, run_dir: Path
) -> None:
    """Check that a signal saves after the current step and that the same command resumes from there.

    Args:
        number: the signal.
        receiver: `launcher` or `rank N`.
        override: recipe override for both starts.
        undisturbed: the same run without interruption.
        quickstart: directory of the `quickstart` fixture.
        run_dir: an empty one.
    """
    run = SFTRun(quickstart, run_dir, "trainer.save_freq=-1", "trainer.max_ckpt_to_keep=null")
    with run.started(override) as process:
        wait_until(lambda: run.last_logged() >= 2, process)
        target = psutil.Process(process.pid) if receiver == "launcher" else ranks_of(process.pid)[int(receiver[-1])]
        target.send_signal(number)
        stopped = end_of(process)
    assert stopped.returncode == STOPPED_EXIT_CODE, stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    record, last = run.record(), run.last_logged()
    assert record["status"] == "stopped"
    assert record["attempts"][0]["exit_reason"] == f"stopped by {number.name} after step {last}"
    assert run.names() == {str(last)}
    assert run.tracker() == str(last)
    says = "the same command resumes from there, after writing the checkpoint's huggingface/"
    assert f"Stopped by {number.name} after step {last}; {says}" in stopped.stdout
    checkpoint = run.run_dir / f"global_step_{last}"
    assert Manifest.read(checkpoint).deferred == ("huggingface",) and not has_export(checkpoint)
    resumed = run.finish(override)
    assert f"Writing {checkpoint.name}/huggingface/" in resumed.stdout
    assert_complete_export(checkpoint, undisturbed.run_dir / checkpoint.name)
    expected = undisturbed.losses(1)
    assert run.losses(1) == {step: expected[step] for step in range(1, last + 1)}
    assert run.losses(2) == {step: expected[step] for step in range(last + 1, NUM_STEPS + 1)}


def assert_complete_export(checkpoint: Path, undisturbed: Path) -> None:
    """Check that an export that was deferred equals that of the undisturbed run."""
    manifests = [Manifest.read(path) for path in (checkpoint, undisturbed)]
    name = "huggingface/model.safetensors"
    assert manifests[0].files[name] == manifests[1].files[name]
    assert manifests[0].deferred == () and damaged_files(checkpoint) == {}


# ---- saves that fail in the file system ------------------------------------------------------------------------------

KEEP_ONE = "trainer.max_ckpt_to_keep=1"
IN_A_SHARD = Hold(SAVE, "DigestingFile.write", "global_step_4.tmp/optim", rank=1, call=5)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a disk that holds one checkpoint (27 MB) but not two; the test is skipped where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Write a file that takes all free space, and return its path."""
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return path


def assert_refused(result: subprocess.CompletedProcess[str], run: SFTRun, *words: str) -> None:
    """Check that the save of step 4 failed with one message that contains `words` and that step 2 is intact."""
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word in errors[0]
    assert "Traceback" not in result.stdout + result.stderr
    assert run.names() == {"2"}
    assert run.tracker() == "2"


def assert_too_large_save_does_not_begin(
    in_background: bool, disk: Path, undisturbed: SFTRun, quickstart: Path
) -> None:
    """Check that a checkpoint that does not fit on the disk is rejected before anything is written."""
    run = SFTRun(quickstart, disk / "run", KEEP_ONE, f"trainer.checkpoint.async_save={in_background}")
    result = run.start()
    assert_refused(result, run, "global_step_4", "it needs 26.3 MiB", " MiB free")
    assert result.stderr.count(" MiB free") == 2  # in the warning at the save before
    resize(disk, "64m")
    assert_resumes(run, undisturbed, 2)


def assert_full_disk_keeps_earlier_checkpoint(
    in_background: bool, disk: Path, undisturbed: SFTRun, quickstart: Path, directory: Path
) -> None:
    """Check that a disk that fills up within a shard fails the save, and that the run resumes once there is space."""
    resize(disk, "64m")
    run = SFTRun(quickstart, disk / "run", KEEP_ONE, f"trainer.checkpoint.async_save={in_background}")
    with run.held(IN_A_SHARD, directory) as held:
        assert run.names() == {"2", "4.tmp"}
        filler = fill(disk)
        result = held.release()
    # during a save in the background, a row of metrics.jsonl may fail first
    assert_refused(result, run, "No space left on device", *([] if in_background else ["global_step_4.tmp/"]))
    filler.unlink()
    assert_resumes(run, undisturbed, 2)


def assert_file_size_limit_fails_save(undisturbed: SFTRun, quickstart: Path, directory: Path) -> None:
    """Check that a file size limit on a rank fails its save."""
    run = SFTRun(quickstart, directory / "run")
    with run.held(IN_A_SHARD, directory) as held:
        rank = held.ranks()[IN_A_SHARD.rank]
        rank.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        result = held.release()
    assert_refused(result, run, "global_step_4.tmp/optim_world_size_2_rank_1.pt", "File too large")
    assert run.attempts()[0]["exit_reason"] in result.stderr
    assert_resumes(run, undisturbed, 2)
