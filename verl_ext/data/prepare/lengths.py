"""How long the conversations are, to choose `data.max_length` by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verl_ext.data.prepare.files import Row
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_code import require_no_code
from verl_ext.progress import progress_bar

PERCENTILES = (50, 90, 99)


def length_percentiles(rows: list[Row], tokenizer: str | None) -> dict[str, float]:
    """Measure whole conversations.

    Args:
        rows: samples with `messages` and perhaps `tools`.
        tokenizer: directory of a tokenizer with a chat template; None measures characters of content.

    Returns:
        The 50th, 90th and 99th percentile and the maximum, named with their unit; nothing for no rows.

    Raises:
        UserError: the tokenizer is missing or has no chat template.
    """
    if not rows:
        return {}
    import numpy as np  # here, so that --help need not wait for it

    unit, measure = ("chars", _num_chars) if tokenizer is None else ("tokens", _token_counter(tokenizer))
    lengths = [measure(row) for row in progress_bar(rows, desc="measuring lengths", unit="rows")]
    found = np.percentile(lengths, PERCENTILES, method="inverted_cdf")  # lengths that occur, and none between two
    named = {f"{unit}_p{percent}": int(length) for percent, length in zip(PERCENTILES, found)}
    return {**named, f"{unit}_max": max(lengths)}


def _num_chars(row: Row) -> int:
    return sum(len(message.get("content") or "") for message in row["messages"])


def _token_counter(directory: str) -> Callable[[Row], int]:
    from transformers import AutoTokenizer

    if not Path(directory).is_dir():
        raise UserError(f"--tokenizer {directory} is not a directory; give one with tokenizer.json in it")
    require_no_code(directory, trusted=False, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of missing or damaged file raises an exception of its own
        raise UserError(
            f"--tokenizer {directory} holds no tokenizer that loads ({first_line_of(error)}); give a model's directory"
        ) from error
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer in {directory} has no chat template; choose a chat model's directory")
    return lambda row: len(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools")))
