"""One progress bar for all long work, with the time left; lines without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verl_ext.console import progress_bar, staged_progress


@pytest.mark.parametrize(("is_terminal", "show"), [(True, True), (True, False), (False, True)])
def test_bar_is_drawn_only_on_terminal(
    is_terminal: bool, show: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert list(progress_bar([1, 2], desc="counting", unit="things", show=show)) == [1, 2]
    with progress_bar(total=2048, desc="reading", unit="B", show=show) as bar:
        bar.update(1024)
    shown = capsys.readouterr()
    assert shown.out == ""
    if is_terminal and show:
        assert "counting: 100%" in shown.err and "2/2 [00:00<00:00" in shown.err and " things/s]" in shown.err
        assert "reading:  50%" in shown.err and "1.00k/2.00k" in shown.err
    else:
        assert shown.err == ""


def test_long_work_prints_lines_without_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_ext.console.LINE_EVERY_S", 0.0)
    with progress_bar(total=4, desc="measuring", unit="runs") as bar:
        bar.update(2)
    with progress_bar(total=4, desc="outer", unit="runs") as outer:
        list(progress_bar(iter("ab"), desc="reading", unit="rows", leave=False))
        outer.update(4)
    with progress_bar(total=4, desc="training", unit="steps", lines=False) as bar:
        bar.update(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("measuring: 0/4 runs, ") and "measuring: 2/4 runs, 00:00 left" in lines
    assert "reading: 2 rows" in lines and "outer: 4/4 runs, 00:00 left" in lines
    assert not any("training" in line or "x1b" in line for line in lines)


def test_parts_advance_bar_by_expected_duration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with staged_progress({"first": 1, "second": 3}) as begin:
        begin("first")
        begin("second")
    shown = capsys.readouterr().err
    assert "first:   0%" in shown and "second:  25%" in shown and "second: 100%" in shown


@pytest.mark.parametrize(
    ("is_terminal", "rank", "is_drawn"), [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_transformers_bars_follow_same_rules(
    is_terminal: bool,
    rank: str,
    is_drawn: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2)).save_pretrained(tmp_path)
    Qwen2ForCausalLM.from_pretrained(tmp_path)
    shown = capsys.readouterr().err
    assert ("Loading weights" in shown, "Writing model shards" in shown) == (is_drawn, is_drawn)
    assert not are_progress_bars_disabled()  # those of downloads


def test_configuring_transformers_bars_imports_nothing() -> None:
    code = "import sys, verl_ext.console, eval_pipeline; print('transformers' in sys.modules, 'tqdm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False"
