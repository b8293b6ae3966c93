"""The sentence behind each key of a YAML file of defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml


def comments_of(path: Path) -> dict[str, str]:
    """Dotted key to the comment on the line of its value; keys without one are left out."""
    text = path.read_text(encoding="utf-8")
    return dict(_comments(yaml.compose(text), "", text.splitlines()))


def _comments(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _comments(value, f"{name}.", lines)
            continue
        behind = lines[value.end_mark.line][value.end_mark.column :].strip()
        if behind.startswith("#"):
            yield name, behind.lstrip("# ")
