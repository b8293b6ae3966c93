"""The monitor's page and panels on a simulated client, without a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nicegui import Client, ui
from nicegui.events import ValueChangeEventArguments

from tests.helpers.monitor import following, look, write_evaluation, write_record, write_rows
from tests.helpers.pages import element, on_client, panel_of, texts_of
from verl_ext.config.schema import to_yaml
from verl_ext.health import checklist
from verl_ext.monitor import charts, file_panels, page
from verl_ext.monitor.charts import short_names
from verl_ext.monitor.configuration import ConfigurationPanel
from verl_ext.monitor.file_panels import LAST_LINES, HealthPanel, LogPanel
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.overview import RunTable
from verl_ext.monitor.page import MonitorPage
from verl_ext.monitor.panels import ComparePanel, TrainingPanel, differing_keys, flatten, rates_by_step
from verl_ext.monitor.sharing import SharedResults
from verl_ext.monitor.state import MAX_COMPARED, TABS, PageState
from verl_ext.trainer.stages import load_config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with one live run of five steps, `p/old`."""
    root = tmp_path / "checkpoints"
    write_record(root / "p/old")
    write_rows(root / "p/old", 1, range(1, 6))
    return root


@pytest.fixture
def follower(root: Path) -> Iterator[RunFollower]:
    with following(root) as made:
        yield made


def bytes_read() -> int:
    """Bytes read by this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


# The address


def test_url_round_trips_page_state() -> None:
    state = PageState(
        run="p/a & b=c,d/é", tab="Samples", runs=("a,b", "c&d"), metrics=("train/lr(1e-3)", "x"), smoothing=0.25,
        rates=("timeout_rate",), axis="time", log_charts=("Loss",),
        source="eval/eval_step_4/qa_logs/few_qa.jsonl", step=40, search="what? <b>",
        split="eval", error="timeout", reward_from=-0.5, reward_to=1.0, grouped=True, sample="4 x/1", colors="mask",
        dataset="a&b", a="base_x", b="step_4", problem="p #1", log_source="console", log_search="x",
        setting_search="lr", changed="1",
    )  # fmt: skip
    assert PageState.from_query(state.to_query()) == state
    table = PageState(filter="a & b", sort="-step")
    assert PageState.from_query(table.to_query()) == table
    assert PageState(run="p/a", filter="a", sort="step").to_query() == "?run=p%2Fa"
    assert PageState.from_query("") == PageState() and PageState().to_query() == "."


@pytest.mark.parametrize(
    "query",
    [
        "tab=Nothing",
        "smoothing=nan",
        "smoothing=inf",
        "smoothing=x",
        "reward_from=nan",
        "reward_to=x",
        "grouped=yes",
        "step=-1",
        "step=²",
        "step=" + "9" * 400,
        "?",
        "=",
        "x=%ff",
    ],
)
def test_invalid_url_shows_default_state(query: str) -> None:
    assert PageState.from_query(query) == PageState()


def test_smoothing_is_clamped_to_limits() -> None:
    assert PageState.from_query("smoothing=7").smoothing == 0.99
    assert PageState.from_query("smoothing=-7").smoothing == 0.0


def test_url_with_too_many_runs_keeps_them() -> None:
    runs = tuple(f"p/{number}" for number in range(MAX_COMPARED + 4))
    assert PageState.from_query(PageState(runs=runs).to_query()).runs == runs


# The page


@pytest.mark.parametrize("tab", TABS)
def test_status_follows_run_on_every_tab(
    tab: str, root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in page.PANELS.values():
        monkeypatch.setattr(kind, "period_s", 1e9)

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState(run="p/old", tab=tab))
        shown.update_status()
        await shown.update_panel()
        assert element(client, "value Current step").text == "5"
        write_rows(root / "p/old", 1, range(6, 8))
        look(follower)
        shown.update_status()
        assert element(client, "value Current step").text == "7"

    on_client(check)


def test_page_without_run_shows_table_and_opens_runs(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(root / "q/new", status="failed")
    look(follower)
    addresses: list[str] = []
    monkeypatch.setattr(ui.navigate.history, "push", addresses.append)

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState())
        await shown.update_panel()
        rows = {row["path"]: row for row in element(client, "runs").rows}
        assert {*rows} == {"p/old", "q/new"} and rows["p/old"]["stepLabel"] == "5 / 100"
        assert (rows["p/old"]["Loss"], rows["q/new"]["Loss"], rows["q/new"]["status"]) == (5.0, None, "failed")
        shown.open_run("q/new")
        shown.update_status()
        assert addresses == ["?run=q%2Fnew"] and element(client, "status").text == "failed"
        shown.state = PageState.from_query("?run=gone")
        shown._build()
        assert "does not exist" in element(client, "missing").text and element(client, "runs").rows

    on_client(check)


def test_page_follows_appearing_and_deleted_runs(root: Path, follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState(run="p/new"))
        element(client, "missing")
        write_record(root / "p/new")
        look(follower)
        shown.update_status()
        assert element(client, "shown").text == "p/new"
        assert {*element(client, "run").options} == {"p/old", "p/new"}
        (root / "p/new/run.json").unlink()
        look(follower)
        shown.update_status()
        element(client, "missing")

    on_client(check)


def test_filter_order_and_log_search_are_in_the_address(root: Path, follower: RunFollower) -> None:
    (root / "p/old/console.log").write_text("one\ntwo\n")

    async def check_table(client: Client) -> None:
        state = PageState(filter="old", sort="-step")
        panel = panel_of(RunTable, follower, state)
        table = element(client, "runs")
        assert table.props["filter"] == "old"
        assert (table.pagination["sortBy"], table.pagination["descending"]) == ("step", True)
        element(client, "filter").set_value(None)
        order = {"sortBy": "path", "descending": False}
        panel._sort(ValueChangeEventArguments(sender=table, client=client, value=order, previous_value={}))
        assert (state.filter, state.sort) == ("", "path")

    async def check_log(client: Client) -> None:
        state = PageState(run="p/old", log_source="console", log_search="TWO")
        panel = panel_of(LogPanel, follower, state)
        await panel._choose()
        assert (state.log_source, state.log_search) == ("console", "TWO") and element(client, "search").value == "TWO"
        assert element(client, "found").visible
        element(client, "log source").value = "events"
        await panel._choose()
        assert state.log_source == ""

    async def check_configuration(client: Client) -> None:
        (root / "p/old/config.yaml").write_text("stage: sft\n")
        state = PageState(run="p/old", setting_search="stage", changed="1")
        await panel_of(ConfigurationPanel, follower, state).show()
        settings = element(client, "settings")
        assert (settings.props["filter"], settings.rows) == ("stage", [])
        element(client, "setting search").set_value(None)
        element(client, "changed only").set_value(False)
        assert (state.setting_search, state.changed, len(settings.rows)) == ("", "", 1)

    on_client(check_table)
    on_client(check_log)
    on_client(check_configuration)


def test_comparison_does_not_affect_the_next_run(follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui.navigate.history, "push", lambda url: None)

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState(runs=("p/old",), tab="Compare", metrics=("train/loss",)))
        shown.open_run("")
        assert shown.state == PageState()

    on_client(check)


def test_page_says_which_files_cannot_be_read(root: Path, follower: RunFollower) -> None:
    (root / "p/old/metrics.jsonl").unlink()
    (root / "p/old/metrics.jsonl").mkdir()
    look(follower)

    async def check(client: Client) -> None:
        MonitorPage(follower, PageState(run="p/old"))
        assert element(client, "reason").text == "metrics.jsonl cannot be read (Is a directory)"
        await panel_of(RunTable, follower, PageState()).show()
        assert element(client, "problems").text == "p/old/metrics.jsonl cannot be read (Is a directory)"

    on_client(check)


def test_link_keeps_run_and_comparison(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/new")
    look(follower)

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState.from_query("?run=p%2Fold&tab=Compare&runs=p%2Fold&runs=p%2Fnew"))
        await shown.update_panel()
        assert shown.state.runs == ("p/old", "p/new") == tuple(element(client, "compared").value)

    on_client(check)


def test_charts_pause_while_rows_arrive_quickly(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "time", clock := SimpleNamespace(monotonic=lambda: clock.now, now=100.0))

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState(run="p/old"))
        drawn = []
        for step in range(6, 26):
            clock.now += 0.5
            write_rows(root / "p/old", 1, range(step, step + 1))
            look(follower)
            shown.update_status()
            assert element(client, "value Current step").text == str(step)
            await shown.update_panel()
            drawn.append(element(client, "chart Loss").options["series"][0]["data"][-1][0])
        assert drawn == [5] * 4 + [10] * 5 + [15] * 5 + [20] * 5 + [25]  # every 2.5 s

    on_client(check)


def test_update_without_changes_makes_no_query(follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState(run="p/old"))
        shown.update_status()
        await shown.update_panel()
        queries: list[str] = []
        follower.reader._connection.set_trace_callback(queries.append)
        shown.update_status()
        await shown.update_panel()
        assert queries == []

    on_client(check)


# Panels


def test_at_most_ten_runs_are_compared(root: Path, follower: RunFollower) -> None:
    for number in range(11):
        write_record(root / f"p/run{number}")
    look(follower)

    async def check(client: Client) -> None:
        panel = panel_of(RunTable, follower, PageState())
        table, button, advice = (element(client, name) for name in ("runs", "compare", "advice"))
        for count, is_allowed in ((0, False), (1, False), (2, True), (10, True), (11, False)):
            table.selected = table.rows[:count]
            panel._count_selected()
            assert button.enabled == is_allowed
        assert advice.text == "Select 2 to 10 runs to compare them (11 selected)"
        runs = tuple(row["path"] for row in table.rows)
        compared = panel_of(ComparePanel, follower, PageState(runs=runs[:10]))
        element(client, "compared").set_options([*runs], value=[*runs[:11]])
        assert compared.state.runs == runs[:10]

    on_client(check)


def test_chart_is_redrawn_only_when_changed(root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(root / "p/old", 1, range(6, 7), perplexity=2.0)
    look(follower)
    drawn: list[str] = []

    def chart_options(curves: object, chart: charts.Chart, *style: Any) -> dict[str, Any]:
        drawn.append(chart.name)
        return {"grid": {"bottom": 0}, "xAxis": {"name": "step"}, "dataZoom": [{}]}

    monkeypatch.setattr("verl_ext.monitor.panels.chart_options", chart_options)

    async def check(client: Client) -> None:
        panel = panel_of(TrainingPanel, follower, PageState(run="p/old"))
        await panel.show()
        write_rows(root / "p/old", 1, range(7, 8))
        look(follower)
        await panel.show()
        assert drawn == ["Loss", "Perplexity", "Loss"]

    on_client(check)


def test_training_tab_draws_metrics_without_a_chart_on_request(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/empty")
    write_rows(root / "p/old", 1, range(6, 8), **{f"custom{number:02}": 1.0 for number in range(30)})
    look(follower)

    def drawn(client: Client) -> list[str]:
        names = [str(each.props.get("data-testid")) for each in client.elements.values()]
        return [name.removeprefix("chart train/") for name in names if name.startswith("chart ")]

    async def check(client: Client) -> None:
        panel = panel_of(TrainingPanel, follower, PageState(run="p/old"))
        await panel.show()
        more, pages = element(client, "more"), element(client, "more pages")
        assert drawn(client) == ["chart Loss"] and more.text == "More metrics (30)"
        assert not element(client, "empty").visible and not element(client, "fold").visible
        more.set_value(True)
        assert drawn(client)[1:] == [f"custom{number:02}" for number in range(12)]
        pages.set_value(3)
        assert drawn(client)[1:] == [f"custom{number:02}" for number in range(24, 30)]
        more.set_value(False)
        assert drawn(client) == ["chart Loss"]

    async def check_empty(client: Client) -> None:
        await panel_of(TrainingPanel, follower, PageState(run="p/empty")).show()
        assert element(client, "empty").visible and not element(client, "more").visible

    on_client(check)
    on_client(check_empty)


def test_compare_offers_runs_that_start_while_it_is_open(root: Path, follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        panel = panel_of(ComparePanel, follower, PageState(run="p/old"))
        await panel.show()
        write_record(root / "p/new")
        look(follower)
        await panel.show()
        select = element(client, "compared")
        assert {*select.options} == {"p/old", "p/new"} and select.value == ["p/old"]

    on_client(check)


def test_compare_shows_differing_configuration_keys(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/new")
    write_rows(root / "p/new", 1, range(1, 9))
    for name, lr in (("old", 1e-5), ("new", 2e-5)):
        (root / f"p/{name}/config.yaml").write_text(to_yaml(load_config("sft", [f"optim.lr={lr}"])))
    look(follower)

    async def check(client: Client) -> None:
        state = PageState(runs=("p/new", "p/old", "p/gone"), metrics=("train/loss", "no/such"))
        panel = panel_of(ComparePanel, follower, state)
        await panel.show()
        assert element(client, "compared").value == ["p/new", "p/old"]
        rows = {row["key"]: (row["run0"], row["run1"]) for row in element(client, "differences").rows}
        assert rows == {"optim.lr": ("2e-05", "1e-05")}
        [latest] = element(client, "latest values").rows
        assert latest == {"key": "train/loss", "run0": "8", "run1": "5"}
        tables = [element(client, name) for name in ("latest values", "differences")]
        write_rows(root / "p/new", 1, range(9, 10))
        (root / "p/new/config.yaml").write_text(to_yaml(load_config("sft", ["optim.lr=3e-05"])))
        look(follower)
        await panel.show()
        assert [element(client, name) for name in ("latest values", "differences")] == tables
        assert [table.rows[0]["run0"] for table in tables] == ["9", "3e-05"]
        names = [line["name"] for line in element(client, "chart comparison train/loss").options["series"]]
        assert names == ["new", "old"]
        assert element(client, "compared note").text.startswith("2 of the 3 runs in the address are shown")

    on_client(check)


def test_configurations_are_compared_key_by_key() -> None:
    one, other = flatten({"a": {"b": 1, "c": [1]}, "d": {}}), flatten({"a": {"b": 2, "c": [1]}, "e": None})
    assert one == {"a.b": "1", "a.c": "[1]", "d": "{}"}
    assert differing_keys([one, other]) == {"a.b": ["1", "2"], "d": ["{}", "-"], "e": ["-", "null"]}
    assert short_names(["p/a", "p/b"]) == ["a", "b"] and short_names(["p/a"]) == ["p/a"]
    assert short_names(["a", "a/a"]) == ["a", "a/a"]  # a chart would draw one of them
    lr = "p/sft_a_model_with_a_long_name-lr1e-{}_seed{}_and_a_suffix"
    assert short_names([lr.format(5, 0), lr.format(4, 1)]) == ["lr1e-5_seed0", "lr1e-4_seed1"]
    assert short_names([lr.format(5, 0), lr.format(5, 1)]) == ["seed0", "seed1"]
    assert short_names(["p/a", "q/a"]) == ["p/a", "q/a"] and short_names(["p", "p/a"]) == ["p", "a"]


def test_configuration_tab_shows_attempts_and_changed_settings(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/old"
    write_record(run_dir, a1=0, a2=3)
    record = json.loads((run_dir / "run.json").read_text())
    record["attempts"][0] |= {"command": "bash run_sft.sh 1 <b>x</b>", "device_names": ["CPU", "CPU"]}
    record["attempts"][1] |= {
        **{"command": "bash run_sft.sh 2", "packages": {"torch": "2.9"}, "environment": "damaged"},
        **{"config_defaults": {"optim.lr": 1e-4}, "config_changes": {"optim.lr": [1e-5, 2e-5], "gone": [[1], None]}},
    }
    (run_dir / "run.json").write_text(json.dumps(record))
    (run_dir / "config.yaml").write_text("optim: {lr: 2.0e-05}\nstage: sft\n")
    look(follower)

    async def check(client: Client) -> None:
        def rows() -> list[tuple[str, ...]]:
            return [tuple(row.values()) for row in element(client, "settings").rows]

        panel = panel_of(ConfigurationPanel, follower, PageState(run="p/old"))
        await panel.show()
        assert [row["Devices"] for row in element(client, "attempts").rows] == ["2 × CPU", ""]
        assert element(client, "command").text == "bash run_sft.sh 2"
        assert element(client, "packages").rows == [{"Name": "torch", "Value": "2.9"}]
        assert rows() == [("optim.lr", "2e-05", "0.0001", "1e-05"), ("stage", "sft", "", "")]
        element(client, "changed only").set_value(True)
        assert rows() == [("optim.lr", "2e-05", "0.0001", "1e-05")]
        element(client, "changed only").set_value(False)
        element(client, "attempt").set_value(1)
        assert element(client, "command").text == "bash run_sft.sh 1 <b>x</b>"
        assert rows() == [("optim.lr", "1e-05", "", ""), ("stage", "sft", "", ""), ("gone", "[1]", "", "")]
        for chosen, shown in ((1, 1), (2, 2), (4, 5)):  # the last one is followed
            element(client, "attempt").set_value(chosen)
            record["attempts"].append({**record["attempts"][1], "attempt": len(record["attempts"]) + 1})
            (run_dir / "run.json").write_text(json.dumps(record))
            look(follower)
            await panel.show()
            assert element(client, "attempt").value == shown

    on_client(check)


def test_configuration_tab_says_why_settings_are_missing(root: Path, follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        panel = panel_of(ConfigurationPanel, follower, PageState(run="p/old"))
        await panel.show()
        table = element(client, "settings")
        assert table.props["no-data-label"] == "Not recorded"
        (root / "p/old/config.yaml").write_text("optim: [")
        await panel.show()
        assert "config.yaml cannot be read (" in table.props["no-data-label"] and table.rows == []

    on_client(check)


def test_health_tab_does_not_reread_growing_run(root: Path, follower: RunFollower) -> None:
    (root / "p/old/config.yaml").write_text(to_yaml(load_config("sft", [])))
    write_rows(root / "p/old", 1, range(6, 4000))
    size = (root / "p/old/metrics.jsonl").stat().st_size
    look(follower)

    async def check(client: Client) -> None:
        panel = panel_of(HealthPanel, follower, PageState(run="p/old", tab="Health"))
        await panel.show()
        assert len(client.elements) > 20
        write_rows(root / "p/old", 1, range(4000, 4001))
        before = bytes_read()
        await panel.show()
        assert bytes_read() - before < size / 2

    on_client(check)


def test_findings_and_reason_are_shown_in_language_of_page(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/old"
    (run_dir / "config.yaml").write_text(to_yaml(load_config("sft", [])))
    event = {"time": 1.0, "step": 5, "name": "val_loss_not_finite", "level": "ok", "text": "val/loss is finite"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    look(follower)

    async def check(client: Client) -> None:
        state = PageState(run="p/old", preferences={"language": "zh"})
        for kind in (HealthPanel, LogPanel):
            await panel_of(kind, follower, state).show()
        shown = " ".join(each.text for each in client.elements.values() if isinstance(each, ui.label))
        assert "每个检查点" in shown and "train/loss 下降" in shown and "损失是有限数" in shown
        assert "第 5 步: val_loss_not_finite: val/loss 是有限数" in shown

    on_client(check)


def test_evaluation_without_a_rate_has_no_point() -> None:
    metrics = {20: {"pass_at_5": 0.5, "intervals": {"pass_at_5": [0.25, 0.75]}}, 10: {"pass_at_5": None}, 5: {}}
    assert rates_by_step(metrics, ["pass_at_5", "timeout_rate"]) == {"pass_at_5": {20: (0.5, 0.25, 0.75)}}


def test_run_table_updates_with_new_values(root: Path, follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        panel = panel_of(RunTable, follower, PageState())
        write_rows(root / "p/old", 1, range(6, 7))
        event = {"time": 1.0, "step": 6, "name": "loss_diverging", "level": "alarm", "text": "it rises"}
        (root / "p/old/events.jsonl").write_text(json.dumps(event) + "\n")
        look(follower)
        await panel.show()
        [row] = element(client, "runs").rows
        assert (row["step"], row["Loss"], row["healthLabel"], row["healthColor"]) == (6, 6.0, "alarm", "negative")
        for step, value in ((7, float("nan")), (8, float("inf"))):
            write_rows(root / "p/old", 1, range(step, step + 1), loss=value)
            look(follower)
            await panel.show()
            assert element(client, "runs").rows[0]["Loss"] == str(value)

    on_client(check)


def test_run_table_shows_chains_progress_and_current_warnings(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(ui, "page_title", titles.append)
    write_record(root / "p/new", status="finished", total_steps=20)
    write_record(root / "p/grpo")
    write_rows(root / "p/grpo", 1, range(1, 3))
    (root / "p/grpo/config.yaml").write_text("model: {partial_pretrain: /x/p/new/global_step_8/huggingface}\n")
    path = root / "p/new/eval/eval_step_8/metrics.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"datasets": {"humaneval": {"accepted_at_1": 0.25}}}))
    found = {"step": 6, "name": "loss_diverging", "text": "it <b>rises</b>; lower the rate"}
    for name, level, moment in (("old", "alarm", 1.0), ("grpo", "warning", 2.0), ("new", "alarm", 3.0)):
        (root / f"p/{name}/events.jsonl").write_text(json.dumps({**found, "level": level, "time": moment}) + "\n")
    look(follower)

    async def check(client: Client) -> None:
        shown = MonitorPage(follower, PageState())
        await shown.update_panel()
        rows = element(client, "runs").rows
        place = [row["label"] for row in rows].index("p/new")
        assert [(row["label"], row["depth"], row.get("from")) for row in rows[place : place + 3]] == [
            ("p/new", 0, ""), ("humaneval", 1, ""), ("p/grpo", 1, "from step 8"),
        ]  # fmt: skip
        assert rows[place + 1]["bestLabel"] == "25.0%, step 8" and rows[place + 1]["tab"] == "Evaluation"
        [old] = [row for row in rows if row["label"] == "p/old"]
        assert (old["share"], old["stepLabel"]) == (0.05, "5 / 100")
        warned = [each for each in client.elements.values() if each.props.get("data-testid") == "alarm"]
        assert ["p%2Fgrpo" in each.props["href"] for each in warned] == [True, False], "newest first, running only"
        assert titles[-1] == "(1) Training monitor"

    async def check_sorted(client: Client) -> None:
        panel = panel_of(RunTable, follower, PageState())
        event = ValueChangeEventArguments(
            sender=panel._table, client=client, value={"sortBy": "best"}, previous_value={}
        )
        panel._sort(event)
        rows = {row["path"]: row for row in element(client, "runs").rows}
        assert panel.state.sort == "best" and {row["depth"] for row in rows.values()} == {0}
        assert rows["p/new\0humaneval"]["label"] == "p/new · humaneval"
        assert rows["p/grpo"]["from"] == "p/new from step 8" and rows["p/new"]["from"] == ""

    on_client(check)
    on_client(check_sorted)


def test_only_existing_runs_stay_selected(root: Path, follower: RunFollower) -> None:
    for name in ("new", "other"):
        write_record(root / f"p/{name}")
    write_evaluation(root / "p/new", 8, gsm8k={"accepted_at_1": 0.5})
    look(follower)

    async def check(client: Client) -> None:
        panel = panel_of(RunTable, follower, PageState())
        table, advice = element(client, "runs"), element(client, "advice")
        table.selected = [*table.rows]
        panel._count_selected()
        assert len(table.rows) == 4 and advice.text.endswith("(3 selected)")
        assert {row["path"] for row in table.selected} == {"p/old", "p/new", "p/other"}
        (root / "p/other/run.json").unlink()
        look(follower)
        await panel.show()
        assert {row["path"] for row in table.selected} == {"p/old", "p/new"} and advice.text.endswith("(2 selected)")

    on_client(check)


def test_new_warning_leaves_others_and_their_fold_as_they_are(root: Path, follower: RunFollower) -> None:
    def write(number: int) -> None:
        event = {"time": number, "step": 1, "name": f"rule{number}", "level": "alarm", "text": f"alarm {number}"}
        with open(root / "p/old/events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")

    async def check(client: Client) -> None:
        def texts(name: str) -> list[str]:
            return [text for text in texts_of(element(client, name)) if text.startswith("rule")]

        for number in range(1, 8):
            write(number)
        look(follower)
        panel = panel_of(RunTable, follower, PageState())
        fold = element(client, "earlier")
        fold.set_value(True)
        lines = dict(panel._alarms._lines)
        for number in (8, 3, 9):  # the first rule that has reported twice moves to the top
            write(number if number != 3 else 10)
        look(follower)
        await panel.show()
        shown = [f"rule{number}: alarm {number}" for number in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)]
        assert texts("alarms") == shown[:5] and texts("earlier") == shown[5:]
        assert fold.value and fold.visible and fold.text == "Earlier warnings (5)"
        assert {*lines.items()} <= {*panel._alarms._lines.items()}
        (root / "p/old/events.jsonl").unlink()
        write(1)
        look(follower)
        await panel.show()
        assert texts("alarms") == shown[-1:] and not fold.visible

    on_client(check)


def test_new_lines_of_console_leave_others_as_they_are(root: Path, follower: RunFollower) -> None:
    path = root / "p/old/console.log"

    async def check(client: Client) -> None:
        async def labels(content: str) -> list[ui.label]:
            path.write_text(content)
            await panel.show()
            shown = [each for each in log.descendants() if isinstance(each, ui.label)]
            assert [each.text for each in shown] == [line for line in content.splitlines() if line][-LAST_LINES:]
            return shown

        panel, log = panel_of(LogPanel, follower, PageState(run="p/old", log_source="console")), element(client, "log")
        first = await labels("one\n\ntwo\nthr")
        assert (await labels("one\n\ntwo\nthree\nfour\n"))[:2] == first[:2], "the last line was incomplete"
        many = "".join(f"line {number}\n" for number in range(LAST_LINES))
        second = await labels("one\n\ntwo\nthree\nfour\n" + many)
        assert (await labels(path.read_text() + "more\n"))[:-1] == second[1:]
        await labels("another file\n")

    on_client(check)


@pytest.mark.parametrize("source", ["", "console"])
def test_log_search_finds_new_lines(source: str, root: Path, follower: RunFollower) -> None:
    path = root / "p/old/console.log"
    path.write_text("no match\n")

    async def check(client: Client) -> None:
        panel = panel_of(LogPanel, follower, PageState(run="p/old", log_source=source, log_search="loss 20"))
        await panel.show()
        table = element(client, "found")
        assert table.visible and table.rows == []
        path.write_text("no match\nrank 0: loss 20\n")
        write_rows(root / "p/old", 1, range(6, 21))
        look(follower)
        deadline = time.monotonic() + 60
        while not table.rows and time.monotonic() < deadline:  # a search of the console may be too recent
            await panel.show()
        [row] = table.rows
        assert "loss 20" in row["text"]

    on_client(check)


def test_equal_health_is_not_drawn_again(root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "p/old/config.yaml").write_text(to_yaml(load_config("sft", [])))
    monkeypatch.setattr(file_panels, "_files_state", lambda directory: object())  # always due
    monkeypatch.setattr(checklist, "silence_s", lambda run, last_row: 5.0)  # the page names the seconds

    async def check(client: Client) -> None:
        panel = panel_of(HealthPanel, follower, PageState(run="p/old"))
        await panel.show()
        first = [*element(client, "health").descendants()]
        follower.files = SharedResults(1)
        await panel.show()
        assert [*element(client, "health").descendants()] == first and len(first) > 20

    on_client(check)
