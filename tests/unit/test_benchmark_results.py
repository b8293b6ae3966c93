"""Every committed figure says when and where it was measured, and is told of in the documents."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from benchmarks.about import about, machine
from tests.helpers import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_when_and_where(path: Path) -> None:
    found = json.loads(path.read_text())
    assert date(2026, 11, 1) < date.fromisoformat(found["date"]) <= date.today()
    assert "x86_64" in found["machine"] or "NVIDIA" in found["machine"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_linked_from_a_page(path: Path) -> None:
    assert any(f"benchmarks/results/{path.name}" in page.read_text() for page in (ROOT / "docs").glob("*.md"))


def test_the_machine_is_described() -> None:
    assert machine() == about()["machine"] and " GiB, " in machine()
    assert about("torch")["versions"]["torch"]
