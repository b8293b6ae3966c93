"""`python -m verl_ext.checkpoint` as users run it."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers import ROOT
from tests.helpers.checkpoints import NAMES, checkpoint_command, kept, save
from verl_ext.checkpoint.lease import hold_lease
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.checkpoint.retention import remove_tree
from verl_ext.files import hold_run_lock

COMMAND = [sys.executable, "-m", "verl_ext.checkpoint"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 10 to 40, of which 20 is the best; one checkpoint is kept as newest and one as best."""
    for step, loss in ((10, 2.0), (20, 1.5), (30, 3.0), (40, 2.5)):
        save(tmp_path, step, val=loss, train=loss / 2)
    (tmp_path / "config.yaml").write_text("trainer: {max_ckpt_to_keep: 1, checkpoint: {keep_best: 1}}\n")
    return tmp_path


def test_ls_prints_aligned_table_with_retention_reasons(run_dir: Path) -> None:
    (run_dir / "global_step_50").mkdir()
    (run_dir / "global_step_45.tmp").mkdir()
    (run_dir / "global_step_5.removing").mkdir()
    header, *lines = checkpoint_command("ls", run_dir).splitlines()
    lines, problems = lines[:7], lines[7:]
    assert header.split() == "step size ranks saved at state val/loss train/loss kept because".split()
    assert [int(line.split()[0]) for line in lines] == [50, 45, 40, 30, 20, 10, 5]
    column = header.index("kept because")
    assert [line[column:] for line in lines] == [
        "not complete, so rotation leaves it alone",
        "the next start, save or prune removes it",
        "the newest",
        "rotation would remove it",
        "the best by val/loss",
        "rotation would remove it",
        "the next start, save or prune removes it",
    ]
    assert problems == [
        "global_step_50: it has no manifest.json, so it was never completed",
        "global_step_45.tmp: a save that is in progress or was interrupted",
        "global_step_5.removing: a removal that is in progress or was interrupted",
    ]
    assert lines[4][header.index("val/loss") :].split()[:2] == ["1.5", "0.75"]


def test_ls_json_reports_retention_and_size(run_dir: Path) -> None:
    (run_dir / "global_step_50").mkdir()
    entries = {entry["step"]: entry for entry in json.loads(checkpoint_command("ls", run_dir, "--json"))}
    assert entries[20]["kept_because"] == ["the best by val/loss"]
    assert {step for step, entry in entries.items() if entry["will_be_removed"]} == {10, 30}
    assert (entries[20]["world_size"], entries[20]["metrics"]) == (2, {"val/loss": 1.5, "train/loss": 0.75})
    files = [path for path in (run_dir / "global_step_20").rglob("*") if path.is_file()]
    assert entries[20]["bytes"] == sum(path.stat().st_size for path in files)
    assert (entries[50]["complete"], entries[40]["complete"]) == (False, True)


def test_ls_without_configuration_keeps_all(run_dir: Path) -> None:
    (run_dir / "config.yaml").unlink()
    entries = json.loads(checkpoint_command("ls", run_dir, "--json"))
    assert [entry["kept_because"] for entry in entries] == [["max_ckpt_to_keep is null"]] * 4


def test_ls_after_restart_from_earlier_step_follows_tracker(run_dir: Path) -> None:
    save(run_dir, 15)
    entries = {entry["step"]: entry for entry in json.loads(checkpoint_command("ls", run_dir, "--json"))}
    assert entries[15]["kept_because"] == ["the newest"]
    assert entries[40]["will_be_removed"]


def test_verify_lists_damage_and_exits_1(run_dir: Path) -> None:
    output = checkpoint_command("verify", run_dir)
    *lines, last = output.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"global_step_{n}" for n in (40, 30, 20, 10)]
    assert last == "Verified: 4 of 4 checkpoints are undamaged"
    assert output.count("every digest is correct") == 4
    model = run_dir / "global_step_30" / NAMES[0]
    flipped = bytearray(model.read_bytes())
    flipped[0] ^= 1
    model.write_bytes(flipped)  # of the same size, so that only the digest differs
    output = checkpoint_command("verify", run_dir, code=1)
    assert "global_step_30: damaged or incomplete\n  " + NAMES[0] + " has the digest " in output
    assert output.count("every digest is correct") == 3 and "Verified: 3 of 4 checkpoints" in output
    assert checkpoint_command("verify", run_dir, "--step", 10, 40).count("\n") == 3
    (run_dir / "global_step_50").mkdir()
    assert "never completed" in checkpoint_command("verify", run_dir, "--step", 50, code=1)
    os.rename(run_dir / "global_step_10", run_dir / "global_step_11")
    assert "manifest belongs to step 10" in checkpoint_command("verify", run_dir, "--step", 11, code=1)


def test_prune_follows_configuration_and_options(run_dir: Path) -> None:
    (run_dir / "global_step_45.tmp").mkdir()
    output = checkpoint_command("prune", run_dir, "--dry-run")
    assert "global_step_10" in output and "global_step_30" in output and "This frees" in output
    assert kept(run_dir) == [10, 20, 30, 40]
    assert "pass --yes" in checkpoint_command("prune", run_dir, code=2)
    assert kept(run_dir) == [10, 20, 30, 40]
    told = checkpoint_command("prune", run_dir, "--max-to-keep", 2, "--yes")
    assert "1 of 1 checkpoints and 1 leftover\n" in told
    assert told.endswith("global_step_40, global_step_30, global_step_20\n")
    assert kept(run_dir) == [20, 30, 40]
    checkpoint_command("prune", run_dir, "--keep-best", 0, "--yes")
    assert kept(run_dir) == [40]
    assert "Nothing to remove" in checkpoint_command("prune", run_dir)


OF_EVALUATION = ("eval/eval_step_40/metrics.json.tmp", "eval/eval_step_40/verdicts/a.jsonl.tmp")
REPLACED = (
    "node_check.0a1b.tmp",
    "best_model.pt.tmp",
    "checkpoint_epoch_12.pt.tmp",
    "latency_model.json.tmp",
    *OF_EVALUATION,
)


def test_prune_removes_leftovers_of_interrupted_saves(run_dir: Path) -> None:
    checkpoint_command("prune", run_dir, "--yes")
    names = ["global_step_45.tmp", "global_step_5.removing", "global_step_50.tmp.removing"]
    for name in names:
        (run_dir / name).mkdir()
        (run_dir / name / "model.pt").write_bytes(bytes(1000))
    lease, young = run_dir / "global_step_40" / "lease.host.1.json.tmp", run_dir / "best_checkpoint.json.tmp"
    left = [lease, *(run_dir / name for name in REPLACED)]
    being_written = [young, run_dir / "checkpoint_epoch_13.pt.tmp", run_dir / "eval/eval_step_40/summary.json.tmp"]
    of_a_user = [run_dir / "notes.tmp", run_dir / "eval/notes.tmp"]
    (run_dir / "eval/eval_step_40/verdicts").mkdir(parents=True)
    for path in (*left, *being_written, *of_a_user):
        path.touch()
    for path in (*left, *of_a_user):
        os.utime(path, (0, 0))
    entries = {entry["step"] for entry in json.loads(checkpoint_command("ls", run_dir, "--json"))}
    assert entries == {5, 20, 40, 45, 50}
    checkpoint_command("prune", run_dir, "--step", 20, "--yes")
    assert len(list(run_dir.glob("global_step_*"))) == 4  # --step does not remove leftovers
    told = checkpoint_command("prune", run_dir, "--dry-run")
    assert all(name in told for name in names) and "This frees 2.9 KiB" in told
    told = checkpoint_command("prune", run_dir, "--yes")
    assert f"0 of 0 checkpoints and {len(names) + len(left)} leftovers" in told
    assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_40"]
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in (*being_written, *of_a_user))
    assert "Nothing to remove" in checkpoint_command("prune", run_dir)


def test_prune_drops_optimizer_of_best_checkpoint(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(
        "trainer: {max_ckpt_to_keep: 3, checkpoint: {keep_best: 1, drop_optimizer_of_best: true}}\n"
    )
    save(run_dir, 50)  # now 20 is kept only as the best
    assert "rotation would drop its optimizer" in checkpoint_command("ls", run_dir)
    assert "global_step_20 (optimizer only)" in checkpoint_command("prune", run_dir, "--yes")
    assert kept(run_dir) == [20, 30, 40, 50]
    assert Manifest.read(run_dir / "global_step_20").dropped == ("optimizer",)
    assert "complete, without optimizer" in checkpoint_command("ls", run_dir)
    checkpoint_command("verify", run_dir)


def test_deferred_export_is_listed(run_dir: Path) -> None:
    manifest = Manifest.read(run_dir / "global_step_20")
    (run_dir / "global_step_20/manifest.json").write_text(replace(manifest, deferred=("huggingface",)).to_json())
    assert checkpoint_command("ls", run_dir).count("complete, export deferred") == 1
    found = json.loads(checkpoint_command("ls", run_dir, "--json"))
    assert {each["step"]: each["deferred"] for each in found}[20] == ["huggingface"]
    checkpoint_command("verify", run_dir)


def test_prune_by_step_rejects_protected_checkpoints_with_fix(run_dir: Path) -> None:
    keep, choice = run_dir / "global_step_10" / "keep", run_dir / "best_checkpoint.json"
    keep.touch()
    choice.write_text('{"step": 20}')
    assert f"delete {keep} first" in checkpoint_command("prune", run_dir, "--step", 30, 10, "--yes", code=2)
    assert f"{choice} names global_step_20" in checkpoint_command("prune", run_dir, "--step", 20, "--yes", code=2)
    assert "would resume from" in checkpoint_command("prune", run_dir, "--step", 40, "--yes", code=2)
    with hold_lease(run_dir / "global_step_30"):
        message = checkpoint_command("prune", run_dir, "--step", 30, "--yes", code=2)
    assert f"is being read by process {os.getpid()}" in message
    assert kept(run_dir) == [10, 20, 30, 40]
    keep.unlink()
    checkpoint_command("prune", run_dir, "--step", 10, 30, "--yes")
    assert kept(run_dir) == [20, 40]
    choice.write_text("{")
    assert "repair or delete it" in checkpoint_command("prune", run_dir, "--step", 20, "--yes", code=2)


def test_prune_rejects_running_training(run_dir: Path) -> None:
    with hold_run_lock(run_dir):
        message = checkpoint_command("prune", run_dir, "--yes", code=2)
        assert f"in use by process {os.getpid()} on " in message and message.rstrip().endswith(
            "wait for it, or stop it"
        )
        (run_dir / "global_step_45.tmp").mkdir()
        planned = checkpoint_command("prune", run_dir, "--dry-run")
        assert "global_step_10" in planned and "in use" in planned and "global_step_45" not in planned
    assert "global_step_45.tmp (leftover)" in checkpoint_command("prune", run_dir, "--dry-run")
    assert kept(run_dir) == [10, 20, 30, 40]


def test_prune_without_file_locks_keeps_save_in_progress(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre may be mounted without locks, so a training run may still be writing this directory."""
    (run_dir / "global_step_45.tmp").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
        checkpoint_command("prune", run_dir, "--yes")
    assert (run_dir / "global_step_45.tmp").is_dir() and kept(run_dir) == [20, 40]
    checkpoint_command("prune", run_dir, "--yes")
    assert not (run_dir / "global_step_45.tmp").exists()


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("n", 1, [10, 20, 30, 40]), ("\x04", 1, None), ("y", 0, [20, 40])]
)
def test_prune_asks_for_confirmation_on_terminal(run_dir: Path, answer: str, code: int, left: list[int] | None) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    result = subprocess.run([*COMMAND, "prune", run_dir], cwd=ROOT, stdin=theirs, capture_output=True, text=True)
    os.close(ours)
    os.close(theirs)
    assert "Remove them? [y/N]" in result.stdout
    assert result.returncode == code, result.stderr
    assert kept(run_dir) == ([20, 40] if answer == "y" else [10, 20, 30, 40])


def test_failed_removal_exits_1(run_dir: Path) -> None:
    (run_dir / "global_step_10.removing").write_text("a file where the directory is to be renamed to")
    checkpoint_command("prune", run_dir, "--yes", code=1)
    assert kept(run_dir) == [10, 20, 40]


def test_bad_input_prints_one_sentence_and_exits_2(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    cases = {
        "is not a directory": ("ls", empty / "none"),
        "contains no checkpoint": ("verify", empty),
        "is a checkpoint; specify its run directory": ("prune", run_dir / "global_step_10"),
        "no checkpoint of step 11; available steps: 40, 30, 20, 10": ("verify", run_dir, "--step", 11),
        "--step cannot be combined": ("prune", run_dir, "--step", 10, "--keep-best", 1),
        "'0' is not an integer of 1 or more": ("prune", run_dir, "--max-to-keep", 0),
    }
    for message, words in cases.items():
        error = checkpoint_command(*words, code=2)
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["trainer: [", "- 1\n", "trainer: 3\n", "trainer: {max_ckpt_to_keep: two}\n", "trainer: {checkpoint: 3}\n"]
)
def test_invalid_configuration_is_rejected(run_dir: Path, text: str) -> None:
    (run_dir / "config.yaml").write_text(text)
    assert "config.yaml" in checkpoint_command("ls", run_dir, code=2)


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["verify"], ["prune", "--dry-run"]])
def test_commands_do_not_import_torch(run_dir: Path, words: list[str]) -> None:
    arguments = words if words == ["--help"] else [words[0], str(run_dir), *words[1:]]
    code = (
        "import sys\nfrom verl_ext.checkpoint.__main__ import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["verify"], ["prune", "--dry-run"], ["prune", "--yes"]])
def test_concurrent_rotation_does_not_fail_commands(
    run_dir: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, victim = Manifest.read, run_dir / "global_step_10"
    calls = 0

    def read_while_rotating(directory: Path) -> Manifest:
        nonlocal calls
        calls += directory == victim
        if calls == rotates_at and victim.exists():
            remove_tree(victim)
        return read(directory)

    monkeypatch.setattr(Manifest, "read", staticmethod(read_while_rotating))
    command, *options = words
    for rotates_at in range(1, 10):
        calls = 0
        told = checkpoint_command(command, run_dir, *options)
        assert "Verified: 4 of 4" in told or command != "verify" or not victim.exists()
        if victim.exists() or calls < rotates_at:
            break
        save(run_dir, 10, val=2.0)
        (run_dir / "latest_checkpointed_iteration.txt").write_text("40")
    assert rotates_at > 1
