"""Documents that are made from the code are those that the code makes, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.health_curves import CURVES
from verl_ext.health.rules import RULES
from verl_ext.metrics.reference import render_reference

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_metrics_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text().strip() == render_reference().strip()


def test_the_page_on_health_has_every_rule() -> None:
    page = (ROOT / "docs/health.md").read_text()
    for each in RULES:
        assert f"| `{each.name}` | {each.meaning} |" in page
    assert f"a labelled set of {len(CURVES)} runs" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_tests_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+_\w+_\w+)`", text):  # three words and more: `test_freq` is a key
        assert f"def {name}(" in tests or f"{name}.py" in {path.name for path in (ROOT / "tests").rglob("*.py")}, name
