"""Real W&B runs, all of them offline."""

import json
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
import wandb

from tests.helpers.faults import fill, small_disk
from tests.helpers.wandb_files import read_history, read_records, values_of
from verl_ext.errors import UserError
from verl_ext.metrics import wandb_dashboard
from verl_ext.metrics.jsonl import HealthEvent
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
    log_attempt(run_dir, 2, [2, 3])
    run_id = persistent_run_id(run_dir)
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
    assert capsys.readouterr().err.count("warning: W&B is off") == 1


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
    sink = WandbSink(run)
    monkeypatch.setattr(sink._dashboard, "log", lambda now: open("/nowhere"))
    with pytest.raises(FileNotFoundError):
        sink.close(1)
    assert finished == [1]
