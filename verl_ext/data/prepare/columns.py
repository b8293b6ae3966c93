"""Nested columns that parquet would alter are kept as JSON text."""

from __future__ import annotations

import json
from typing import Any

from verl_ext.data.prepare.files import Row


def encode_unfaithful_columns(rows: list[Row]) -> list[Row]:
    """Turn into JSON text each nested column, `messages` apart, that parquet cannot give back unchanged.

    Parquet gives all objects of a column the same members, so in a `tools` column each function would get the
    other functions' parameters, as nulls, and the model would be shown tools that do not exist.

    Args:
        rows: the samples; they are not changed.

    Returns:
        Rows with such columns as JSON text and all other columns as they were.
    """
    names = dict.fromkeys(name for row in rows for name in row if name != "messages")
    encoded = {name for name in names if not _survives([row.get(name) for row in rows])}
    return [
        {name: json.dumps(value) if name in encoded and value is not None else value for name, value in row.items()}
        for row in rows
    ]


def _survives(values: list[Any]) -> bool:
    import pyarrow

    if not any(isinstance(value, (dict, list)) for value in values):
        return True
    try:
        return pyarrow.array(values).to_pylist() == values
    except (pyarrow.ArrowException, OverflowError):
        return False
