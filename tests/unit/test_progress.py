"""One bar for all long work: with the time left on a terminal, none elsewhere."""

from __future__ import annotations

import sys

import pytest

from verl_ext.progress import progress_bar, staged


@pytest.mark.parametrize(("is_terminal", "show"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_drawn_on_a_terminal_alone(
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


def test_parts_move_the_bar_by_what_they_are_expected_to_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with staged({"first": 1, "second": 3}) as begin:
        begin("first")
        begin("second")
    shown = capsys.readouterr().err
    assert "first:   0%" in shown and "second:  25%" in shown and "second: 100%" in shown
