"""Reading a parquet file that a run was given."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow

from verl_ext.errors import UserError, first_line_of


def read_frame(name: str) -> pd.DataFrame:
    """All rows of a file, `~` for the home directory.

    Raises:
        UserError: it cannot be read: its end may be whole, which a launcher looks at, and its pages not.
    """
    path = Path(name).expanduser()
    try:
        return pd.read_parquet(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({first_line_of(error)}); prepare it again") from error
