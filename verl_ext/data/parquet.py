"""Reading a parquet file that a run was given."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from verl_ext.config.inputs import reading_parquet


def read_frame(name: str) -> pd.DataFrame:
    """All rows of a file, `~` for the home directory.

    Raises:
        UserError: it cannot be read.
    """
    path = Path(name).expanduser()
    with reading_parquet(path):
        return pd.read_parquet(path)
