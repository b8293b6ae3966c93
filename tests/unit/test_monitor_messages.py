"""The Chinese messages of findings, checklists and the log."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.health_curves import (
    CURVES,
    Rows,
    change_attempt,
    change_config,
    history_of,
    make_silent,
    view_of,
    write_checkpoint,
    write_run,
)
from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.inspection import list_all
from verl_ext.checkpoint.lease import hold_lease
from verl_ext.checkpoint.manifest import Manifest, read_complete, why_incomplete
from verl_ext.health import checklist, run_directory
from verl_ext.health.checklist import checklists, first_steps
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext
from verl_ext.health.rule import REWARD, HealthView, Rule
from verl_ext.health.rules import RULES
from verl_ext.health.run_directory import RunDirectory, why_killed
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.run_record import LOST
from verl_ext.monitor.database import LogEvent
from verl_ext.monitor.messages import MESSAGES, pattern_of, translate_event, translate_message
from verl_ext.monitor.run_files import events_of_attempt, events_of_row
from verl_ext.processes import pid_namespace

BY_NAME = {rule.name: rule for rule in RULES}
ENDS = (
    LOST, "stopped by SIGTERM after step 9", "stopped by the deadline after step 9",
    "stopped by the health rule overfitting after step 9", "stopped by SIGTERM", "stopped by a signal to a rank",
    "stopped immediately by SIGTERM", "stopped immediately by a second SIGINT",
    "killed after SIGTERM because the step and the save took longer than trainer.preemption.grace_s=60 s",
)  # fmt: skip
"""Reasons in `run.json`, of `trainer.run_logger` and `launch.report`."""
DISK = (
    "it cannot be read (EIO)", "its files cannot be read (EIO)", "it has no shards",
    "cannot be read now: its file model.pt cannot be read (EIO)", "its file model.pt cannot be read (EIO)",
)  # fmt: skip
"""Messages of `checkpoint.manifest` about a disk that fails, and a checkpoint that is removed meanwhile."""


def findings() -> Iterator[str]:
    """The findings of all rules on all synthetic runs, and rare ones."""
    for each in CURVES:
        view = view_of(each, 0)
        yield from (found.sentence for rule in RULES if (found := rule.run(view)) is not None)
    yield from (rule.advice for rule in RULES)
    view = view_of(next(each for each in CURVES if each.name == "overfitting"), 0)
    yield sentence_of(BY_NAME["overfitting"], replace(view, context=replace(view.context, checkpoints=lambda: [150])))
    yield sentence_of(Rule("mine", lambda view: [][0], "It fails.", "fix it"), view).removesuffix("; fix it")
    yield of_rows("loss_not_finite", [(1, {"train/loss": float("nan")})])
    yield of_rows("reward_negative", [(step, {REWARD: -1 / step}) for step in range(1, 101)])
    for flat in ({REWARD: 0.5}, {REWARD: 0.5, "train/accuracy_mean": 0.5}):
        yield of_rows("nothing_improves", [(step, {**flat, "train/epoch": step / 5}) for step in range(1, 121)])


def sentence_of(rule: Rule, view: HealthView) -> str:
    found = rule.run(view)
    assert found is not None
    return found.sentence


def of_rows(rule: str, rows: Rows) -> str:
    return sentence_of(BY_NAME[rule], HealthView(history_of(rows), RunContext("budget"), HealthLimits()))


def listed(run_dir: Path) -> Iterator[str]:
    """The texts of a run's checklists."""
    for title, items in checklists(RunDirectory.read(run_dir)).items():
        yield title
        for item in items:
            yield item.text
            if item.result is not None:
                yield item.result.message


def checklist_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The texts of all checklist items, of healthy and damaged runs."""
    run = write_run(tmp_path / "ended", "a textbook run")
    change_config(run, "trainer.logger", ["wandb"])
    for status, reason, closed in (
        ("waiting", None, []), ("failed", "NCCL", []), ("stopped", "NCCL", []),
        ("finished", "all steps completed", ["wandb"]),
    ):  # fmt: skip
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**record, "status": status}))
        change_attempt(run, exit_reason=reason, closed_trackers=closed)
        yield from listed(run)
    read = RunDirectory.read(run)
    grpo = replace(read, view=replace(read.view, context=replace(read.view.context, stage="grpo")))
    yield from (item.text for item in first_steps(grpo))
    yield from checkpoint_messages(run)

    run = write_run(tmp_path / "live", "a textbook run", "running", "")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:50]))
    change_config(run, "trainer.device", "cuda")
    change_attempt(run, host=socket.gethostname())
    monkeypatch.setattr(checklist, "gpu_utilization", lambda ids: [0.5, 0.9])
    yield from listed(run)
    make_silent(run, 3600)
    yield from listed(run)
    (run / "metrics.jsonl").write_text("x\n")
    yield from listed(run)
    monkeypatch.setattr(run_directory, "seconds_since_heartbeat", lambda path: 60.0)
    here = {"host": socket.gethostname(), "pid_namespace": pid_namespace(), "pid": 2**22 + 1}
    for attempt in (here, {"host": "elsewhere", "heartbeat_s": 10.0}):
        yield why_killed(run, {"status": "running", "attempts": [attempt]}, 0.0, 1.0) or ""


def checkpoint_messages(run: Path) -> Iterator[str]:
    """The messages about checkpoints of a run while they are damaged, one after the other."""
    write_checkpoint(run, 200)
    for tracker in ("", "x", "9", "200"):
        (run / "latest_checkpointed_iteration.txt").write_text(tracker)
        yield from listed(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    shutil.rmtree(run / "global_step_200")
    write_checkpoint(run, 100)
    shutil.rmtree(run / "global_step_100/huggingface")
    (run / "global_step_100/manifest.json").write_text(Manifest(100, 1, "", {}, deferred=("huggingface",)).to_json())
    yield from listed(run)
    yield from (each.state for each in list_all(run, None, CheckpointConfig()))
    (run / "global_step_100/manifest.json").write_text(Manifest(100, 1, "", {}).to_json())
    change_config(run, "trainer.save_freq", 100)
    yield from listed(run)
    manifest = run / "global_step_300/manifest.json"
    text = manifest.read_text()
    others = [text.replace(*words) for words in (("64", "65"), ("data.", "x."), ("model.", "x."), ("300", "30"))]
    for damaged in (*others, "x", None):
        manifest.write_text(damaged) if damaged else manifest.unlink()
        yield from listed(run)
        yield from (each.state for each in list_all(run, None, CheckpointConfig()))
    shutil.rmtree(run / "global_step_100")
    yield from listed(run)


def reasons_of_verl_checkpoints(path: Path) -> Iterator[str]:
    """Why checkpoints that verl wrote are incomplete."""
    for place, names in enumerate((["model_1", "model_2"], ["model_2"], ["model_1"], ["model_1", "data"])):
        directory = path / f"verl/{place}/global_step_1"
        directory.mkdir(parents=True)
        for name in names:
            file = "data.pt" if name == "data" else f"model_world_size_{name[-1]}_rank_0.pt"
            (directory / file).touch()
        yield why_incomplete(directory) or ""


def states_of_checkpoints(run: Path) -> Iterator[str]:
    """States of checkpoints and leftovers of a run, and what rotation does with them."""
    for step in (5, 10, 20, 30, 40):
        write_checkpoint(run, step)
    (run / "global_step_50").mkdir()
    (run / "global_step_10/keep").touch()
    (run / "global_step_40/lease.other.1.json").write_text("x")
    (run / "global_step_20/manifest.json").write_text(
        replace(read_complete(run / "global_step_20"), metrics={"val/loss": 1.0}, dropped=["optimizer"]).to_json()
    )
    for suffix in (".tmp", ".removing"):
        (run / f"global_step_60{suffix}").mkdir()
    (run / "global_step_70").mkdir()
    (run / "global_step_70/model_world_size_1_rank_0.pt").touch()
    for best in ("{}", '{"step": 1.5}', '{"step": 20}'):
        (run / "best_checkpoint.json").write_text(best)
        for max_to_keep in (None, 1, 2):
            for keep_best in (1, 2):
                config = replace(CheckpointConfig(), keep_best=keep_best)
                with hold_lease(run / "global_step_30"):
                    found = list_all(run, max_to_keep, config)
                yield from (text for each in found for text in (each.state, each.retention))


def log_lines() -> Iterator[str]:
    """Events of attempts, and of a step with a checkpoint."""
    times = {"attempt": 1, "start": "2026-01-01T00:00:00+00:00", "end": "2026-01-01T00:00:01+00:00"}
    for attempt in (
        {"exit_reason": "all steps completed"},
        {"exit_reason": "all steps are done"},
        {"host": "h", "world_size": 2, "exit_reason": LOST},
    ):
        yield from (event.text for event in events_of_attempt({**times, **attempt}))
    yield from (event.text for event in events_of_row(MetricsRow(3, 1, 1.0, {"time/train/save_s": 2.5})))


CHECKPOINTS = ("complete, written by verl itself", "verl itself wrote it", "rotation would drop its optimizer")
"""Texts of `checkpoint.inspection` about checkpoints of verl, and about optimizer shards."""
NAME = re.compile(r"\w+(?:[./]\w+)+|\w*_\w+|(?<![\w.])[-+]?\d[\d.e-]*%?")
"""Metrics, settings, files and numbers."""
ENGLISH = re.compile(r"[A-Za-z]{2,} [a-z]{2,}")


def test_messages_are_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = {*findings(), *ENDS, *DISK, *CHECKPOINTS, *log_lines(), *states_of_checkpoints(tmp_path / "rotated")}
    sentences |= {*checklist_messages(tmp_path, monkeypatch), *reasons_of_verl_checkpoints(tmp_path)}
    for sentence in sentences - {""}:
        chinese = translate_message("zh", sentence)
        assert all(re.search("[\u4e00-\u9fff]", clause) for clause in chinese.split("；")), (sentence, chinese)
        commands_and_details = r"python -m \S+ \w+|（.*?）"
        assert not ENGLISH.search(re.sub(commands_and_details, "", chinese)), (sentence, chinese)
        assert {*NAME.findall(sentence)} - {"nat/token"} <= {*NAME.findall(chinese)}, (sentence, chinese)
        assert translate_message("en", sentence) == sentence
    clauses = {clause for each in sentences for clause in each.split("; ")}
    clauses |= {clause.partition(": ")[2] for clause in clauses}  # without the name of a checkpoint
    assert not [each for each in MESSAGES if not any(map(pattern_of(each).fullmatch, clauses))]


def test_messages_of_other_rules_stay_english() -> None:
    assert translate_message("zh", "it varies; my own advice") == "it varies; my own advice"
    [jitter] = [rule for rule in RULES if rule.name == "loss_jitter"]  # it has a semicolon
    advice = translate_message("zh", jitter.advice)
    assert translate_message("zh", f"it varies; {jitter.advice}") == f"it varies；{advice}"


def test_finding_in_log_keeps_name_of_rule() -> None:
    event = LogEvent(1.0, 1, 5, "ok", "loss_not_finite: the loss is finite", "loss_not_finite")
    assert translate_event("zh", event) == "loss_not_finite: 损失是有限数"
    assert translate_event("en", event) == event.text
