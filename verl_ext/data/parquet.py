"""Reading a parquet file that a run was given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.config.inputs import reading_parquet

if TYPE_CHECKING:
    import pandas as pd


def read_frame(name: str) -> pd.DataFrame:
    """All rows of a file, `~` for the home directory.

    Raises:
        UserError: it cannot be read.
    """
    import pandas as pd  # the launcher reads first rows alone, and starts sooner without

    path = Path(name).expanduser()
    with reading_parquet(path):
        return pd.read_parquet(path)


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a file by column, None where it has none.

    Raises:
        UserError: it cannot be read.
    """
    from pyarrow import parquet

    with reading_parquet(path), parquet.ParquetFile(path) as file:
        batch = next(file.iter_batches(1), None)
        return None if batch is None else plain(batch.to_pylist()[0])


def plain(value: Any) -> Any:
    """Arrow's nested arrays and mappings as Python lists and dicts without the null fields that parquet fills in."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None or key == "content"}
    return None if isinstance(value, float) and np.isnan(value) else value
