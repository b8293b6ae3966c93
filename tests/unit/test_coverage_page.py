"""How docs/coverage.md is made."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.coverage_page import reason_for, reasons, render

ROW = re.compile(r"\| `([^`]+\.py)` \| (\d+) \| (\d+) % \| (.*) \|")


def test_a_page_lists_what_is_below_and_leaves_the_reason_empty_where_none_is_known() -> None:
    shares = {"a/low.py": (50, 20.0), "a/high.py": (50, 100.0), "b/lower.py": (100, 10.0)}
    page = render(shares, {"b/": "only on GPUs"})
    assert "**35.0 %** of 200 statements" in page
    assert ROW.findall(page) == [("b/lower.py", "100", "10", "only on GPUs"), ("a/low.py", "50", "20", "")]


def test_a_modules_own_reason_goes_before_its_folders() -> None:
    known = {"a/": "of all", "a/b.py": "its own"}
    assert [reason_for(name, known) for name in ("a/b.py", "a/c.py", "a/d/e.py", "b.py")] == [
        "its own",
        "of all",
        "",
        "",
    ]
    assert all((ROOT / name).exists() and reason for name, reason in reasons().items())
