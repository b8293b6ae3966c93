"""`console.log`: lines of several processes with time and name, and files that fail."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from verl_ext.console_log import CONSOLE_LOG, recording_console

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 1: (.*)")


def recorded(run_dir: Path) -> list[str]:
    return [LINE.fullmatch(line)[1] for line in (run_dir / CONSOLE_LOG).read_text().splitlines()]  # type: ignore[index]


def test_lines_are_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print("before")
    with recording_console(tmp_path, "rank 1"):
        print("a\nb\x1b[31m", end="")
        print(" and its end\n")
        for share in (10, 50, 100):
            sys.stderr.write(f"\rsaving {share}%")
        sys.stderr.write("\n")
        assert sys.stdout.encoding and not sys.stdout.isatty()
    print("after")
    assert recorded(tmp_path) == ["a", "b\\x1b[31m and its end", "saving 100%"]
    assert capsys.readouterr().out == "before\na\nb\x1b[31m and its end\n\nafter\n"


def test_unwritable_file_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONSOLE_LOG).symlink_to("/dev/full")
    with recording_console(tmp_path, "rank 1"):
        print("one")
        print("two")
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err.count("warning: ") == 1 and "No space left on device" in shown.err
    with recording_console(tmp_path / "missing", "rank 1"):
        print("three")
    assert "cannot be opened (No such file or directory)" in capsys.readouterr().err
