"""With `-k`, files without any of its words are not collected: importing all of them takes about 10 s."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COMPUTED_IDS = re.compile(r"parametrize\((?:\"\w+\"|\([^()]*\)), (?!\[)")
"""Values that are not a list in the test's file: their ids may contain a word that the file does not."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a file that `-k` cannot select."""
    expression: str = config.option.keyword
    if not collection_path.match("test_*.py") or not expression or re.search(r"\bnot\b", expression):
        return None
    words = set(re.findall(r"\w+", expression.lower())) - {"and", "or"}
    text = collection_path.read_text()
    may_match = any(word in f"{collection_path.name} {text}".lower() for word in words) or COMPUTED_IDS.search(text)
    return None if may_match else True
