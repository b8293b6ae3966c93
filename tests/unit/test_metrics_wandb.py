"""Real W&B runs, all of them offline."""

import json
import logging
import os
import sys
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import wandb

from tests.helpers.faults import fill, small_disk
from tests.helpers.wandb_files import read_history, read_records, rows_of, values_of
from verl_ext.errors import UserError
from verl_ext.metrics import wandb_dashboard, wandb_files
from verl_ext.metrics.jsonl import HealthEvent, read_metrics
from verl_ext.metrics.recorder import MetricsRecorder
from verl_ext.metrics.registry import lookup_metric
from verl_ext.metrics.sinks import drop_tensorboard_errors
from verl_ext.metrics.wandb_sink import RUN_ID_FILE, WandbSink, open_wandb_run, persistent_run_id


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    """A machine on which W&B was never configured."""
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    monkeypatch.chdir(tmp_path)  # W&B also looks for settings in the working directory
    wandb.teardown()
    yield
    wandb.teardown()


def make_recorder(run_dir, attempt, backends=("wandb",)):
    return MetricsRecorder(
        run_dir=run_dir,
        attempt=attempt,
        backends=backends,
        project="p",
        experiment="e",
        config={},
        total_steps=10,
    )


def log_attempt(run_dir, attempt, steps):
    recorder = make_recorder(run_dir, attempt)
    for step in steps:
        recorder.log(step, {"train/loss": 1.0 / step})
    recorder.close()


def test_two_attempts_without_key_share_one_offline_run(tmp_path, capsys):
    run_dir = tmp_path / "run"
    log_attempt(run_dir, 1, [1, 2, 3])
    run_id = persistent_run_id(run_dir)
    [first] = run_dir.glob(f"wandb/offline-run-*-{run_id}")
    first.rename(first.with_name(f"offline-run-20260101_000000-{run_id}"))  # the names have whole seconds
    log_attempt(run_dir, 2, [2, 3])
    files = sorted(run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2 == len(list(run_dir.glob("wandb/offline-run-*")))
    rows = [
        (row["global_step"], row["attempt"], row["train/loss"])
        for file in files
        for row in read_history(file)
        if "attempt" in row
    ]
    assert rows == [(1, 1, 1.0), (2, 1, 0.5), (3, 1, 1 / 3), (2, 2, 0.5), (3, 2, 1 / 3)]
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.count("wandb sync") == 2


def age(path):
    """Make a file one that W&B's service no longer writes."""
    os.utime(path, (1e9, 1e9))


def test_next_attempt_repairs_files_of_killed_ones(tmp_path, monkeypatch):
    """`wandb sync` would stop at a torn file, and at one without the run; see W&B's `core/internal/runsync`."""
    monkeypatch.setattr(wandb_files, "_TAIL_BYTES", wandb_files._BLOCK_BYTES)
    run_dir = tmp_path / "run"
    recorder = make_recorder(run_dir, 1)
    for step in range(1, 101):
        recorder.log(step, {"train/loss": 1.0 / step, **{f"train/reward_{each}": 1.0 for each in range(20)}})
        recorder.log(step, {"val/loss": 1.0})
    recorder.close()
    run_id = persistent_run_id(run_dir)
    [path] = run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    read_records(path)
    written = rows_of(path)
    os.truncate(path, path.stat().st_size // wandb_files._BLOCK_BYTES // 2 * wandb_files._BLOCK_BYTES)  # as a kill does
    age(path)
    flushed = rows_of(path)
    assert 20 < len(flushed) < 180
    empty = run_dir / f"wandb/offline-run-29991231_235959-{run_id}/run-{run_id}.wandb"
    empty.parent.mkdir()
    empty.write_bytes(path.read_bytes()[: wandb_files._FILE_HEADER_BYTES])
    age(empty)
    log_attempt(run_dir, 2, [101, 102])
    assert not empty.exists() and rows_of(path) == flushed
    size = path.stat().st_size
    assert size % wandb_files._BLOCK_BYTES and wandb_files._read_records(path, 0)[1] == size
    [new] = {*run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb")} - {path}
    later = [row for row in read_history(new) if "attempt" in row]
    keys = ("attempt", "global_step", "train/loss", "val/loss")
    rows = [[row.get(key) for key in keys] for row in (*flushed, *later)]
    assert rows[:-2] == [[row.get(key) for key in keys] for row in written] and [row[:2] for row in rows[-2:]] == [
        [2, 101],
        [2, 102],
    ]
    steps = [row["_step"] for row in (*flushed, *later)]
    assert all(first < second for first, second in pairwise(steps))


def test_complete_file_of_last_attempt_stays_as_it_is(tmp_path):
    log_attempt(tmp_path, 1, [1, 2, 3])
    run_id = persistent_run_id(tmp_path)
    [path] = tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    read_records(path)
    before = path.read_bytes()
    assert wandb_files.repair_offline_files(tmp_path, run_id) == wandb_files.LoggedRows()  # W&B may still write it
    age(path)
    logged = wandb_files.repair_offline_files(tmp_path, run_id)
    assert path.read_bytes() == before and logged.last["global_step"] == 3 and logged.num_steps >= 3
    assert wandb_files.rows_after(logged.last, read_metrics(tmp_path / "metrics.jsonl")) == []
    path.parent.rename(path.parent.with_name("run-29991231_235959-" + run_id))  # an online attempt
    assert wandb_files.repair_offline_files(tmp_path, run_id) == wandb_files.LoggedRows()


def test_damaged_old_file_does_not_stop_wandb(tmp_path, capsys):
    run_id = persistent_run_id(tmp_path)
    path = tmp_path / f"wandb/offline-run-20260101_000000-{run_id}/run-{run_id}.wandb"
    path.mkdir(parents=True)
    age(path)
    log_attempt(tmp_path, 1, [1])
    assert capsys.readouterr().err.count("warning: cannot repair") == 1
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_dashboard_compares_metrics_of_all_attempts(tmp_path):
    for attempt, steps in {1: [1, 2, 3], 2: [3, 4]}.items():
        recorder = make_recorder(tmp_path, attempt)
        for step in steps:
            recorder.log(step, {"train/loss": float(step + 10 * attempt), "train/grad_norm": 1.0})
            recorder.log(step, {"val/loss": 0.5})
        recorder.close()
    path = max(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    shown = [values_of(record.config.update) for record in read_records(path) if record.config.update]
    charts = {name.rpartition("/")[2] for update in shown for name in update if name.startswith("_wandb/visualize/")}
    assert charts == {"Loss", "Gradient norm"}
    path_of_table = "Custom Chart Tables/Dashboard/Loss_table/path"
    table = [row[path_of_table] for row in read_history(path) if path_of_table in row][-1]
    rows = json.loads((path.parent / "files" / table).read_text())["data"]
    assert [row for row in rows if row[1] == "train/loss"] == [
        [step, "train/loss", value] for step, value in ((1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0))
    ]
    assert [row[0] for row in rows if row[1] == "val/loss"] == [1, 2, 3, 4]


def test_metrics_of_dashboard_exist():
    for names in wandb_dashboard.CHARTS.values():
        assert len({lookup_metric(name).unit for name in names}) == 1, names


def test_long_curves_of_dashboard_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(wandb_dashboard, "MAX_POINTS", 10)
    points = wandb_dashboard._Points()
    for step in range(1, 101):
        points.add(step, float(step))
    assert points.values == [float(step) for step in points.steps] and 5 <= len(points.steps) <= 10
    assert max(points.steps) > 80 and min(points.steps) < 20


def test_run_has_group_proxy_and_global_step_as_axis(tmp_path):
    run = open_wandb_run(
        project="p", name="n", directory=tmp_path, config={}, group="g", job_type="eval", proxy="http://127.0.0.1:9"
    )
    assert run.settings.https_proxy == "http://127.0.0.1:9"
    run.log({"global_step": 5, "eval/humaneval/accepted_at_1": 0.5})
    run.finish()
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    metrics = [r.metric for r in read_records(path) if r.WhichOneof("record_type") == "metric"]
    assert ("*", "global_step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
    assert (run.group, run.job_type) == ("g", "eval")


def test_unreachable_server_falls_back_to_offline_with_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    run = open_wandb_run(project="p", name="n", directory=tmp_path, config={}, run_id="abc")
    assert run.offline and run.id == "abc"
    run.finish()
    assert capsys.readouterr().err.count("\n") == 1


def test_respects_wandb_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = open_wandb_run(project="p", name="n", directory=tmp_path, config={})
    assert run.disabled
    run.finish()


def test_missing_package_warns_once_and_opens_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_wandb_run(project="p", name="n", directory=tmp_path, config={}) is None
    assert capsys.readouterr().err.count("warning: W&B is disabled") == 1


def test_run_id_is_persistent_and_replaces_empty_file(tmp_path):
    (tmp_path / RUN_ID_FILE).write_text("\n")
    run_id = persistent_run_id(tmp_path)
    assert run_id and persistent_run_id(tmp_path) == run_id


def test_warnings_and_alarms_become_alerts(tmp_path, capsys):
    recorder = MetricsRecorder(
        run_dir=tmp_path / "run",
        attempt=1,
        backends=["wandb", "console"],
        project="p",
        experiment="e",
        config={},
        total_steps=10,
    )
    for level in ("ok", "notice", "warning", "alarm"):
        recorder.log_event(HealthEvent(3, f"rule_{level}", level, "what was seen"))
    recorder.close()
    [path] = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    alerts = [record.alert for record in read_records(path) if record.WhichOneof("record_type") == "alert"]
    assert [(each.title, each.text, each.level) for each in alerts] == [
        ("rule_warning", "step 3: what was seen", "WARN"),
        ("rule_alarm", "step 3: what was seen", "ERROR"),
    ]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(each["level"], each["step"], each["attempt"]) for each in events] == [
        (level, 3, 1) for level in ("ok", "notice", "warning", "alarm")
    ]
    assert "step 3/10 | alarm: rule_alarm: what was seen" in capsys.readouterr().out


def test_full_disk_prints_only_warnings(tmp_path, capsys, monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    drop_tensorboard_errors()
    with small_disk(tmp_path / "disk") as disk:
        recorder = make_recorder(disk / "run", 1, ["wandb", "tensorboard"])
        recorder.log(1, {"train/loss": 1.0})
        fill(disk)
        with pytest.raises(UserError, match="metrics.jsonl"):
            for step in range(2, 500):
                recorder.log(step, {"train/loss": 1.0})
        recorder.close(2)
        wandb.teardown()
    printed = capsys.readouterr().err.splitlines()
    assert all(line.startswith("warning: metrics no longer go to") for line in printed) and 1 <= len(printed) <= 3
    assert reported == []
    thread = threading.Thread(target=open, args=("/nowhere",))
    thread.start()
    thread.join()
    assert [failure.thread for failure in reported] == [thread]


def test_run_finishes_although_its_charts_cannot_be_written(monkeypatch):
    finished = []
    run = SimpleNamespace(finish=lambda exit_code: finished.append(exit_code))
    sink = WandbSink(run, ())
    monkeypatch.setattr(sink._dashboard, "log", lambda now: open("/nowhere"))
    with pytest.raises(FileNotFoundError):
        sink.close(1)
    assert finished == [1]
