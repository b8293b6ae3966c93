"""Damaged small files in a run directory: commands print no traceback and still find complete checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import checkpoint_command, kept, retention, save
from tests.helpers.health_curves import write_run
from verl_ext.checkpoint.lease import LIFETIME_S, lease_holders
from verl_ext.checkpoint.manifest import TRACKER, Manifest, committed_steps, complete_checkpoints
from verl_ext.checkpoint.resume import find_checkpoint
from verl_ext.checkpoint.retention import rotate
from verl_ext.config.run_config import read_config_file
from verl_ext.console import printable
from verl_ext.errors import UserError
from verl_ext.health.__main__ import main as health
from verl_ext.health.watch import reported_levels
from verl_ext.launch.configure import best_export
from verl_ext.launch.run import last_checkpoint
from verl_ext.metrics.jsonl import MetricsFile, read_metrics
from verl_ext.metrics.run_record import RunRecord

DEEP = "[" * 100_000
HUGE = "1" * 5000
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 300 steps with checkpoints at steps 100, 200 and 300."""
    run_dir = write_run(tmp_path_factory.mktemp("run"), "a textbook run")
    for step in (100, 200):
        save(run_dir, step, val=1.5)
    (run_dir / TRACKER).write_text("300")
    return run_dir


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def change_manifest(change: Change) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        path = run_dir / "global_step_300" / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def replace_text(old: str, new: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        path = run_dir / "global_step_300" / "manifest.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return damage


def add_file(name: str) -> Callable[[Path], None]:
    return change_manifest(lambda content: content["files"].update({name: {"bytes": 1}}))


def write_manifest_text(text: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        (run_dir / "global_step_300" / "manifest.json").write_text(text)

    return damage


MANIFESTS = {
    "deep": write_manifest_text(DEEP),
    "deep_in_files": write_manifest_text('{"files": ' + DEEP),
    "list": write_manifest_text("[]"),
    "huge_number": write_manifest_text('{"step": ' + HUGE + "}"),
    "infinite_size": replace_text('"bytes": 64', '"bytes": Infinity'),
    "size_nan": replace_text('"bytes": 64', '"bytes": NaN'),
    "size_of_300_digits": replace_text('"bytes": 64', f'"bytes": {"1" * 300}'),
    "size_as_text": replace_text('"bytes": 64', '"bytes": "64"'),
    "entry_no_mapping": replace_text('{\n   "bytes": 64\n  }', "64"),
    "nul": add_file("a\0b"),
    "surrogate": add_file("a\ud800b"),
    "surrogate_of_a_byte": add_file("a\udcffb"),
    "long_name": add_file("n" * 5000),
    "files_list": change_manifest(lambda content: content.update(files=["a"])),
    "world_size_infinite": replace_text('"world_size": 1', '"world_size": Infinity'),
    "time_infinite": change_manifest(lambda content: content.update(time=float("inf"))),
    "time_far": change_manifest(lambda content: content.update(time=1e300)),
    "time_text": change_manifest(lambda content: content.update(time="now")),
    "metrics_list": change_manifest(lambda content: content.update(metrics=[1])),
    "metric_huge": change_manifest(lambda content: content.update(metrics={"val/loss": 10**400})),
    "metric_mapping": change_manifest(lambda content: content.update(metrics={"val/loss": {}})),
    "dropped_number": change_manifest(lambda content: content.update(dropped=5)),
    "dropped_text": change_manifest(lambda content: content.update(dropped="optimizer")),
    "step_text": change_manifest(lambda content: content.update(step="300")),
}


@pytest.mark.parametrize("damage", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_damaged_manifest_is_skipped_with_warning(
    damage: Callable[[Path], None], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir)
    warnings: list[str] = []
    assert find_checkpoint(run_dir, "auto", None, warnings.append) == run_dir / "global_step_200"
    assert len(warnings) == 1 and warnings[0].startswith("global_step_300 cannot be resumed: ")
    assert [path.name for path in complete_checkpoints(run_dir)] == ["global_step_200", "global_step_100"]
    assert last_checkpoint(run_dir) is None
    entries = {entry["step"]: entry for entry in json.loads(checkpoint_command("ls", run_dir, "--json"))}
    assert [entries[step]["complete"] for step in (300, 200, 100)] == [False, True, True]
    checkpoint_command("ls", run_dir)
    assert "global_step_300: damaged or incomplete" in checkpoint_command("verify", run_dir, code=1)
    assert "global_step_300" in checkpoint_command("export", run_dir, "--step", 300, code=2)
    assert health([str(run_dir)]) == 1
    assert "global_step_300: it" in capsys.readouterr().out
    checkpoint_command("prune", run_dir, "--max-to-keep", 1, "--keep-best", 0, "--yes")
    assert kept(run_dir) == [200, 300]
    assert rotate(run_dir, *retention(1), 300, pytest.fail) == []
    assert committed_steps(run_dir) == [300, 200]


TRACKERS = ["1" * 300, HUGE, "\0", "\N{ARABIC-INDIC DIGIT THREE}00", "-300", "3e2"]


@pytest.mark.parametrize("text", TRACKERS, ids=["300_digits", "5000_digits", "nul", "arabic", "negative", "float"])
def test_damaged_tracker_is_ignored_with_warning(text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / TRACKER).write_text(text)
    warnings: list[str] = []
    assert find_checkpoint(run_dir, "auto", None, warnings.append) == run_dir / "global_step_300"
    assert len(warnings) == 1 and "tracker" in warnings[0] and len(warnings[0]) < 200
    assert last_checkpoint(run_dir) is None
    for command in ("ls", "verify", "prune"):
        checkpoint_command(command, run_dir, code=1 if command == "verify" else 0)  # one manifest has no digests
    assert health([str(run_dir)]) == 0
    assert "instead of a step" in capsys.readouterr().out


def test_tracker_that_is_a_directory_is_ignored(run_dir: Path) -> None:
    (run_dir / TRACKER).unlink()
    (run_dir / TRACKER).mkdir()
    warnings: list[str] = []
    assert find_checkpoint(run_dir, "auto", None, warnings.append) == run_dir / "global_step_300"
    assert "is missing" in warnings[0]


CHOICES = [DEEP, '{"step": ' + DEEP, f'{{"step": {HUGE}}}', '{"step": true}', '{"step": {}}', "3"]


@pytest.mark.parametrize("text", CHOICES)
def test_damaged_best_record_keeps_all_checkpoints(text: str, run_dir: Path) -> None:
    (run_dir / "best_checkpoint.json").write_text(text)
    warnings: list[str] = []
    assert rotate(run_dir, *retention(1), 300, warnings.append) == []
    assert len(warnings) == 1 and "best_checkpoint.json" in warnings[0]
    entries = json.loads(checkpoint_command("ls", run_dir, "--json"))
    assert all("best_checkpoint.json" in entry["kept_because"][-1] for entry in entries)
    assert "best_checkpoint.json" in checkpoint_command("prune", run_dir, "--step", 100, "--yes", code=2)
    with pytest.raises(UserError, match="best_checkpoint.json"):
        best_export(run_dir)


@pytest.mark.parametrize(
    "text",
    [DEEP, '{"host": ' + DEEP, '{"host": "h", "pid": 1, "expires": 1e300}', f'{{"host": "h", "pid": {HUGE}}}'],
    ids=["deep", "deep_host", "endless", "huge_pid"],
)
def test_damaged_lease_counts_until_old(text: str, run_dir: Path) -> None:
    path = run_dir / "global_step_100" / "lease.other.1.json"
    path.write_text(text)
    assert lease_holders(path.parent) == ["lease.other.1.json, which cannot be read"]
    assert "lease.other.1.json" in checkpoint_command("prune", run_dir, "--step", 100, "--yes", code=2)
    old = path.stat().st_mtime - LIFETIME_S - 1
    os.utime(path, (old, old))
    checkpoint_command("prune", run_dir, "--step", 100, "--yes")


CONFIGS = {
    "deep": "trainer: " + DEEP,
    "deep_mappings": "{a: " * 5000,
    "list": "[]",
    "number": "3",
    "no_utf8": "\xff",
    "no_yaml": "trainer: {",
    "huge_number": f"trainer: {{max_ckpt_to_keep: {HUGE}}}",
    "trainer_number": "trainer: 3",
    "keep_text": "trainer: {max_ckpt_to_keep: two}",
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS.keys())
def test_damaged_configuration_prints_one_sentence(
    text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "config.yaml").write_bytes(text.encode("latin-1"))
    for command in ("ls", "prune"):
        error = checkpoint_command(command, run_dir, code=2)
        assert "config.yaml" in error and error.count("\n") == 1
    checkpoint_command("verify", run_dir, code=1)
    with pytest.raises(SystemExit, match="2"):
        health([str(run_dir)])
    error = capsys.readouterr().err
    assert "config.yaml" in error and error.count("\n") == 1
    assert kept(run_dir) == [100, 200, 300]


@pytest.mark.parametrize("text", [CONFIGS[name] for name in ("deep", "deep_mappings", "huge_number")])
def test_unparsable_configuration_raises_user_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        read_config_file(tmp_path / "config.yaml")


def in_attempt(**values: Any) -> Change:
    return lambda content: content["attempts"][0].update(values)


RECORDS: dict[str, Change] = {
    "status": lambda content: content.update(status={}),
    "total_steps_text": lambda content: content.update(total_steps="300"),
    "total_steps_huge": lambda content: content.update(total_steps=10**100),
    "project_number": lambda content: content.update(project=5),
    "untrained_loss": lambda content: content.update(untrained_loss="x"),
    "attempts_mapping": lambda content: content.update(attempts={}),
    "attempt_number": lambda content: content.update(attempts=[1]),
    "attempt_text": in_attempt(attempt="1"),
    "attempt_null": in_attempt(attempt=None),
    "start_number": in_attempt(start=5),
    "first_step_text": in_attempt(first_step="0"),
    "reason_number": in_attempt(exit_reason=5),
}


@pytest.mark.parametrize("change", [*RECORDS.values(), None], ids=[*RECORDS.keys(), "deep"])
def test_damaged_run_record_is_reported_and_moved_at_start(
    change: Change | None, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "run.json"
    content = json.loads(path.read_text())
    if change is not None:
        change(content)
    path.write_text(json.dumps(content) if change is not None else '{"status": ' + DEEP)
    with pytest.raises(SystemExit, match="2"):
        health([str(run_dir)])
    error = capsys.readouterr().err
    assert "run.json" in error and error.count("\n") == 1
    record = RunRecord(run_dir)
    record.mark_waiting(project="p")
    assert record.start_attempt(first_step=300, world_size=1, total_steps=400) == 2  # metrics.jsonl knows the first
    assert "run.json.corrupt" in capsys.readouterr().err


LINES = {
    "deep": DEEP,
    "step_true": '{"step": true, "attempt": 1, "time": 1}',
    "step_huge": f'{{"step": {"1" * 100}, "attempt": 1, "time": 1}}',
    "step_of_5000_digits": f'{{"step": {HUGE}, "attempt": 1, "time": 1}}',
    "time_infinite": '{"step": 1, "attempt": 1, "time": 1e400}',
    "time_far": '{"step": 1, "attempt": 1, "time": 1e300}',
}
VALUES = {"huge": "1" * 400, "mapping": "{}", "text": '"x"', "list": "[1]"}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_damaged_metrics_line_is_skipped(line: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "metrics.jsonl"
    rows = path.read_text()
    path.write_text(f"{line}\n{rows}")
    assert health([str(run_dir)]) == 0
    assert "the first is line 1: " in capsys.readouterr().err
    path.write_text(f"{rows}{line}\n")
    assert read_metrics(path)[-1]["step"] == 300
    RunRecord(run_dir).start_attempt(first_step=300, world_size=1, total_steps=400)
    MetricsFile(path, attempt=2).close()
    assert path.read_text() == rows


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_value_that_is_no_number_is_left_out(value: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "attempt": 1, "time": 1, "train/loss": {value}, "a": 2}}\n{path.read_text()}')
    assert read_metrics(path)[0] == {"step": 1, "attempt": 1, "time": 1, "a": 2}
    assert health([str(run_dir)]) == 0 and capsys.readouterr().err == ""


def test_damaged_events_line_is_skipped(tmp_path: Path) -> None:
    event = '{"step": 1, "attempt": 1, "name": "loss_zero", "level": "alarm"}'
    bad = [DEEP, event.replace('"loss_zero"', "[]"), event.replace('"alarm"', "5"), event.replace("1,", "{},")]
    (tmp_path / "events.jsonl").write_text("\n".join([*bad, event]))
    assert set(reported_levels(tmp_path / "events.jsonl", 5, [])) == {"loss_zero"}


@pytest.mark.parametrize("name", ["export_plan.json", "huggingface/config.json"])
@pytest.mark.parametrize("text", [DEEP, "[]", "3", "{"])
def test_damaged_export_file_prints_one_sentence(name: str, text: str, tmp_path: Path) -> None:
    import torch

    checkpoint = tmp_path / "global_step_1"
    (checkpoint / "huggingface").mkdir(parents=True)
    torch.save({"w": torch.zeros(2)}, checkpoint / "model_world_size_1_rank_0.pt")
    (checkpoint / "huggingface" / "config.json").write_text("{}")
    files = {path.name: {"bytes": path.stat().st_size} for path in checkpoint.glob("*.pt")}
    (checkpoint / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_ext.checkpoint.rebuild.require_undamaged_shards", lambda *_: None)  # no digests here
        (checkpoint / "manifest.json").write_text(Manifest(1, 1, "", files).to_json())
        error = checkpoint_command("export", tmp_path, code=2)
    assert name in error and error.count("\n") == 1


def test_unencodable_names_are_printable() -> None:
    assert printable(os.fsdecode(b"run\xff") + "\x1b\ud800\n") == "run\\udcff\\x1b\\ud800\n"
