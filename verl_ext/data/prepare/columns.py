"""Columns that parquet would alter or refuse are kept as text."""

from __future__ import annotations

import json
from typing import Any

from verl_ext.data.prepare.files import Row


def encode_unfaithful_columns(rows: list[Row]) -> list[Row]:
    """Turn into text each column, `messages` apart, that parquet cannot give back unchanged.

    Parquet gives all objects of a column the same members, so in a `tools` column each function would get the
    other functions' parameters, as nulls, and the model would be shown tools that do not exist.

    Args:
        rows: the samples; they are not changed.

    Returns:
        The rows; in such columns nested values are JSON text and numbers are text. Other columns are unchanged.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != "messages")
    columns = {name: [row.get(name) for row in rows] for name in names}
    nested = {name for name, values in columns.items() if any(isinstance(value, (dict, list)) for value in values)}
    encoded = {name for name, values in columns.items() if not _survives(values, name in nested)}
    return [
        {name: _text(value, name in nested) if name in encoded else value for name, value in row.items()}
        for row in rows
    ]


def _text(value: Any, nested: bool) -> str | None:
    return value if value is None or (isinstance(value, str) and not nested) else json.dumps(value)


def _survives(values: list[Any], nested: bool) -> bool:
    import pyarrow

    if nested and any(map(_has_empty_object, values)):  # parquet has no struct without members
        return False
    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return False
    return not nested or array.to_pylist() == values


def _has_empty_object(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or any(map(_has_empty_object, value.values()))
    return isinstance(value, list) and any(map(_has_empty_object, value))
