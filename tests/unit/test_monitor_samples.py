"""The monitor's tab of samples: their files, list, groups and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nicegui import Client, ui
from nicegui.events import GenericEventArguments

from tests.helpers.monitor import following, write_record, write_rows
from tests.helpers.pages import element, on_client, panel_of, texts_of
from verl_ext.monitor import sample_tokens
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.sample_rows import as_cell, groups_of, matches, read_samples, sample_columns, sample_sources
from verl_ext.monitor.samples import MAX_SAMPLES, ROW_KEY, SamplesPanel
from verl_ext.monitor.state import PageState


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


def test_finds_samples_of_training_and_evaluations(root: Path) -> None:
    run_dir = root / "p/old"
    samples = [{"step": step, "prompt": "long " * 9, "reward_total": 0.5, "parts": {"a": 1}} for step in (10, 20)]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples) + '{"torn')
    for step in (8, 40):
        path = run_dir / f"eval/eval_step_{step}/qa_logs/few_qa.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"problem_id": "p", "error_type": "timeout", "family": None, "answer": "x" * 99}))
    assert [*sample_sources(run_dir).values()] == ["training", "few · step 40", "few · step 8"]
    rows, is_cut = read_samples(run_dir / "samples.jsonl")
    assert ([row["step"] for row in rows], is_cut) == ([20, 10], False)
    assert sample_columns(rows) == ["step", "reward_total", "prompt", "parts"]
    (run_dir / "samples.jsonl").write_text('{"step": 1, "reward_total": NaN}\n')
    assert [as_cell(row["reward_total"]) for row in read_samples(run_dir / "samples.jsonl")[0]] == ["nan"]
    answers, _ = read_samples(run_dir / "eval/eval_step_8/qa_logs/few_qa.jsonl")
    assert sample_columns(answers) == ["error_type", "problem_id", "answer"]
    assert sample_columns([dict.fromkeys(("sample_id", "prompt", "answer"), "x" * 99)]) == ["prompt", "answer"]


def test_sample_with_id_can_be_opened(follower: RunFollower) -> None:
    async def check(client: Client) -> None:
        panel = panel_of(SamplesPanel, follower, PageState())
        panel._samples = [{"id": f"{name} {'x' * 30}", "answer": name} for name in ("first", "second")]
        panel.redraw()
        table = element(client, "samples")
        row = table.rows[1]
        await panel._select(GenericEventArguments(sender=table, client=client, args=[None, row, 1]))
        assert row["id"].startswith("second") and "second" in texts_of(element(client, "sample"))

    on_client(check)


GROUPED = [
    {"step": 0, "attempt": 1, "split": "eval", "sample_id": "v", "number": 0, "answer": "no", "reward_total": 0.0},
    {"step": 4, "attempt": 1, "split": "train", "sample_id": "t", "number": 0, "answer": "a", "reward_total": 0.5},
    {"step": 4, "attempt": 1, "split": "train", "sample_id": "t", "number": 1, "answer": "b", "reward_total": None},
    {"step": 4, "attempt": 1, "split": "eval", "sample_id": "v", "number": 0, "answer": "lost", "reward_total": 0.25},
    {"step": 4, "attempt": 2, "split": "eval", "sample_id": "v", "number": 0, "answer": "yes", "reward_total": 1.0},
]
"""Samples of a training step and of an evaluation prompt; an attempt repeats step 4."""


def test_samples_of_a_prompt_are_grouped() -> None:
    groups = {group.key: [row["answer"] for row in group.rows] for group in groups_of(GROUPED[::-1])}
    assert groups == {"v": ["no", "yes"], "4 t": ["a", "b"]}
    answers = [{"problem_id": "p", "sample": sample, "answer": "x"} for sample in (1, 0)]
    assert [(group.key, [row["sample"] for row in group.rows]) for group in groups_of(answers)] == [("p", [0, 1])]


def test_link_opens_sample_in_list(root: Path, follower: RunFollower) -> None:
    (root / "p/old/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GROUPED))

    async def check_selected(client: Client) -> None:
        panel = panel_of(SamplesPanel, follower, PageState(run="p/old"))
        await panel.show()
        [row] = [each for each in element(client, "samples").rows if each["answer"] == "lost"]
        await panel._select(GenericEventArguments(sender=panel._table, client=client, args=[None, row, 0]))
        links.append(panel.state.to_query())

    async def check_link(client: Client) -> None:
        await panel_of(SamplesPanel, follower, PageState.from_query(links[0])).show()
        assert "lost" in texts_of(element(client, "sample"))
        assert [row["answer"] for row in element(client, "samples").selected] == ["lost"]

    links: list[str] = []
    on_client(check_selected)
    on_client(check_link)


def test_list_of_samples_says_how_many_there_are(root: Path, follower: RunFollower) -> None:
    rows = [{"step": step, "sample_id": str(step), "answer": f"{step % 2}"} for step in range(2 * MAX_SAMPLES + 1)]
    (root / "p/old/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def check(client: Client) -> None:
        for state in (PageState(run="p/old"), PageState(run="p/old", grouped=True)):
            client.content.clear()
            with client.content:
                panel = panel_of(SamplesPanel, follower, state)
                await panel.show()
                assert element(client, "sample note").text.startswith("The newest 1,000 of 2,001 are listed")
                panel.change(step=7)
                assert element(client, "sample note").text == ""

    on_client(check)


def test_samples_are_filtered_by_reward_and_error_type() -> None:
    rows = [{"reward_total": 0.5, "error_type": "timeout"}, {"pass_ratio": 1}, {"reward_total": None}]

    def found(**limits: Any) -> list[int]:
        return [number for number, row in enumerate(rows) if matches(row, PageState(**limits))]

    assert found() == [0, 1, 2] and found(reward_from=0.6) == [1] and found(reward_to=0.5) == [0]
    assert found(error="timeout") == [0] and found(reward_from=0.5, reward_to=1.0) == [0, 1]


def test_groups_are_shown_side_by_side(root: Path, follower: RunFollower) -> None:
    (root / "p/old/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GROUPED))

    async def check(client: Client) -> None:
        panel = panel_of(SamplesPanel, follower, PageState(run="p/old", grouped=True, reward_from=1.0))
        await panel.show()
        [row] = element(client, "samples").rows
        assert (row["sample_id"], row["step"], row["rewards"], row["mean reward"]) == ("v", "0–4", "0, 1", 0.5)
        await panel._select(GenericEventArguments(sender=panel._table, client=client, args=[None, row, 0]))
        shown = texts_of(element(client, "group"))
        assert panel.state.sample == "v" and shown.index("no") < shown.index("yes") and "lost" not in shown

    on_client(check)


def test_tokens_are_colored_by_difference_and_by_mask(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blue where the trainer's log-probability is higher; the text of a token stays text."""
    (root / "p/old/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GROUPED))
    row = {"step": 4, "attempt": 1, "sample_id": "t", "number": 1, "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    row |= {"texts": ["Q", "<b>", "!"], "rollout_log_probs": [None, -1, -0.5], "trainer_log_probs": [None, -0.75, -1]}
    lines = [json.dumps(row | {"attempt": 2, "texts": ["no"] * 3}), json.dumps(row), '{"step": 4, "attempt": 1, torn']
    (root / "p/old/sample_tokens.jsonl").write_text("\n".join(lines))

    async def check(client: Client) -> None:
        panel = panel_of(SamplesPanel, follower, PageState(run="p/old", split="train", reward_to=None))
        await panel.show()
        [shown] = [each for each in element(client, "samples").rows if each["answer"] == "b"]
        await panel._select(GenericEventArguments(sender=panel._table, client=client, args=[None, shown, 0]))
        labels = [each for each in element(client, "tokens").descendants() if isinstance(each, ui.label)]
        assert texts_of(element(client, "tokens")) == ["Q", "<b>", "!"]
        styles = [str(label.style.get("background")) for label in labels]
        assert styles == ["None", "rgba(37, 99, 235, 0.300)", "rgba(217, 119, 6, 0.600)"]
        assert labels[2].props["title"].split("\n")[:3] == [
            "engine: -0.5000",
            "trainer: -1.0000",
            "difference: -0.5000",
        ]
        element(client, "token colors").set_value("mask")
        labels = [each for each in element(client, "tokens").descendants() if isinstance(each, ui.label)]
        assert ["background" in label.style for label in labels] == [False, True, True]
        assert panel.state.colors == "mask" and not element(client, "token pages").visible

        monkeypatch.setattr(sample_tokens, "TOKENS_PER_PAGE", 2)
        await panel._select(GenericEventArguments(sender=panel._table, client=client, args=[None, shown, 0]))
        pages = [texts_of(element(client, "tokens"))]
        element(client, "token pages").set_value(2)
        assert element(client, "token pages").visible
        assert [*pages, texts_of(element(client, "tokens"))] == [["Q", "<b>"], ["!"]]

    on_client(check)


def test_selected_sample_stays_selected_when_newer_ones_arrive(root: Path, follower: RunFollower) -> None:
    def write(*names: str) -> None:
        rows = [{"step": 4, "sample_id": name, "answer": f"answer {name}"} for name in names]
        rows += [{"answer": f"answer {name}"} for name in names]  # without an identifier
        (root / "p/old/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def check(client: Client) -> None:
        def row_of(answer: str) -> dict[str, Any]:
            return next(row for row in table.rows if row["answer"] == answer)

        async def select(row: dict[str, Any]) -> None:
            await panel._select(GenericEventArguments(sender=table, client=client, args=[None, row, 0]))

        write("a", "b")
        panel, table = panel_of(SamplesPanel, follower, PageState(run="p/old")), element(client, "samples")
        await panel.show()
        assert len({row[ROW_KEY] for row in table.rows}) == 4
        old = row_of("answer a")
        await select(old)
        write("a", "b", "c")
        await panel.show()
        assert table.selected[0][ROW_KEY] == row_of("answer a")[ROW_KEY]
        await select({**old, ROW_KEY: "gone"})
        await select(old)  # the browser's older row
        assert "answer a" in texts_of(element(client, "sample"))

    on_client(check)


def test_equal_group_is_not_drawn_again(root: Path, follower: RunFollower) -> None:
    path = root / "p/old/samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GROUPED))

    async def check(client: Client) -> None:
        panel = panel_of(SamplesPanel, follower, PageState(run="p/old", grouped=True, sample="v"))
        await panel.show()
        drawn = element(client, "group")
        path.write_text(path.read_text() + json.dumps({**GROUPED[1], "number": 2}) + "\n")
        await panel.show()
        assert element(client, "group") is drawn
        path.write_text(path.read_text() + json.dumps({**GROUPED[0], "step": 8}) + "\n")
        await panel.show()
        assert element(client, "group") is not drawn

    on_client(check)
