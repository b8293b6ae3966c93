"""Campaign: the documentation builds as a site without warnings, and its search finds the API and the guides.

The environment is created with uv (100 MB); VERL_EXT_DOCS_PYTHON names an interpreter that has the packages already.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.processes import uv


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with the packages of requirements/docs.in and nothing of the product."""
    if named := os.environ.get("VERL_EXT_DOCS_PYTHON"):
        return named
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed, which creates the environment; or set VERL_EXT_DOCS_PYTHON")
    directory = tmp_path_factory.mktemp("docs") / "venv"
    uv("venv", "--python", "3.11", directory)
    interpreter = str(directory / "bin/python")
    uv("pip", "install", "--python", interpreter, "-r", ROOT / "requirements/docs.in")
    return interpreter


@pytest.fixture(scope="module")
def site(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A strict build fails on a broken link or anchor, or a page missing from docs/README.md."""
    directory = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_search_finds_classes_and_headings(site: Path) -> None:
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    titles = {(entry["location"].partition("#")[0], re.sub("<.*?>", "", entry["title"])) for entry in entries}
    assert ("reference/api/adapters.html", "VLMAdapter") in titles
    assert ("guides/extending.html", "A reward") in titles
    assert ("reference/configuration.html", "Keys without effect") in titles


def test_signatures_have_types_and_docstrings_have_sections(site: Path) -> None:
    page = (site / "reference/api/judge.html").read_text()
    text = re.sub(r"\s+", " ", re.sub("<.*?>", "", page))
    assert "limits: ResourceLimits | None = None" in text and "Parameters:" in text


def test_pages_load_no_external_resources(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert pages
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|icon)"[^>]* href="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]* href="([^"]+)"[^>]* rel="(?:stylesheet|preconnect|icon)"', text)
        assert loaded and not [address for address in loaded if address.startswith(("http", "//"))], page


def test_links_resolve_and_links_out_of_docs_become_text(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # whose addresses are absolute
    links = [(page, address) for page in pages for address in re.findall(r'href="([^"#:?]+)["#]', page.read_text())]
    assert links and [(page, address) for page, address in links if not (page.parent / address).exists()] == []
    outside = re.findall(r"\]\(\.\./\.\./[^)]+\)", "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md")))
    assert outside  # the test needs some
