"""What there is to say of a key in one stage, or in the evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}


@dataclass(frozen=True)
class Entry:
    """One key.

    Attributes:
        key: dotted.
        kind: what it takes.
        default: as YAML has it.
        sentence: what it does.
    """

    key: str
    kind: str
    default: str
    sentence: str


def kind_of(value: Any, choices: Sequence[Any] | None, bounds: tuple[float, float] | None) -> str:
    """What a key takes, in words.

    Args:
        value: its default, interpolations resolved; not None.
        choices: all it may be, where that is a list.
        bounds: least and greatest value, where there are such.
    """
    if choices:
        return ", ".join(f"`{shown(each)}`" for each in choices)
    kind = next(word for type_, word in KINDS.items() if isinstance(value, type_))
    return kind if bounds is None else f"{kind}, {words_of(*bounds)}"


def words_of(low: float, high: float) -> str:
    """A range in words."""
    if math.isinf(high):
        return f"at least {low:.10g}"
    return f"{low:.10g} to {high:.10g}"


def shown(value: Any) -> str:
    """A value as it is written in a recipe."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return "{}" if isinstance(value, Mapping) else json.dumps(value)


def table(entries: Mapping[Entry, Sequence[str]], all_stages: Sequence[str]) -> list[str]:
    """Rows of entries with the stages that have them, "all" for each of them."""
    head = ["| key | stages | takes | default | meaning |", "| --- | --- | --- | --- | --- |"]
    rows = []
    for entry, stages in entries.items():
        where = "all" if list(stages) == list(all_stages) else ", ".join(stages)
        rows.append(f"| `{entry.key}` | {where} | {entry.kind} | `{entry.default}` | {entry.sentence} |")
    return [*head, *rows]
