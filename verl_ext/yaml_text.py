"""Reads the text of a YAML file whose aliases stay within bounds."""

from __future__ import annotations

from pathlib import Path

import yaml

MOST_VALUES = 100_000
"""In a file with aliases, each alias counted as what it stands for."""


def yaml_text(path: Path) -> str:
    """The text of a YAML file, to be parsed; it may be damaged, or somebody else's.

    Ten lines of aliases of aliases can stand for billions of values, which the parsers would build one by one.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is malformed, or its aliases stand for too much.
    """
    text = path.read_text(encoding="utf-8")
    if "*" not in text or "&" not in text:
        return text
    try:
        node = yaml.compose(text, yaml.SafeLoader)  # here an alias is the same node as its anchor
        num_values = _num_values(node, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an alias contains itself") from None
    if num_values > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases expand to more than {MOST_VALUES:,} values")
    return text


def _num_values(node: yaml.Node | None, known: dict[int, int]) -> int:
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
        known[id(node)] = 1 + sum(_num_values(item, known) for pair in pairs for item in pair)
    return known[id(node)]
