"""How long the conversations are, to choose `data.max_length` by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_ext.data.prepare.files import Row
from verl_ext.data.prepare.turns import BadRow
from verl_ext.errors import UserError, first_line_of
from verl_ext.remote_code import require_no_remote_code

PERCENTILES = (50, 90, 99)


def length_percentiles(lengths: Sequence[int], unit: str) -> dict[str, float]:
    """The 50th, 90th and 99th percentile and the maximum, named with their unit; nothing for no lengths."""
    if not lengths:
        return {}
    import numpy as np  # here, so that --help need not wait for it

    found = np.percentile(lengths, PERCENTILES, method="inverted_cdf")  # lengths that occur, and none between two
    named = {f"{unit}_p{percent}": int(length) for percent, length in zip(PERCENTILES, found)}
    return {**named, f"{unit}_max": max(lengths)}


def count_chars(row: Row) -> int:
    """Characters of all turns of a row with `messages`."""
    return sum(len(message.get("content") or "") for message in row["messages"])


def token_counter(directory: str) -> Callable[[Row], int]:
    """A function that counts the tokens of a row with `messages` and perhaps `tools`, rendered as for training.

    The function raises `BadRow` for a row that the chat template refuses.

    Args:
        directory: of a tokenizer with a chat template.

    Raises:
        UserError: the tokenizer is missing or has no chat template.
    """
    from transformers import AutoTokenizer

    from verl_ext.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, check_messages
    from verl_ext.rendering import EndlessTemplate

    if not Path(directory).is_dir():
        raise UserError(f"--tokenizer {directory} is not a directory; give one with tokenizer.json in it")
    require_no_remote_code(directory, trusted=False, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of missing or damaged file raises an exception of its own
        raise UserError(
            f"--tokenizer {directory} holds no tokenizer that loads ({first_line_of(error)}); give a model's directory"
        ) from error
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer in {directory} has no chat template; choose a chat model's directory")
    template = ChatTemplate(tokenizer, {})

    def count(row: Row) -> int:
        columns = {"tools": row["tools"]} if row.get("tools") else {}
        try:
            text = template.render(check_messages(row["messages"]), **columns)
        except EndlessTemplate:  # every other row would take as long
            raise
        except (UserError, *TEMPLATE_ERRORS) as error:
            raise BadRow(
                f"the chat template in {directory} refuses it ({first_line_of(error)})",
                "correct it, skip such rows with the option --skip-bad, or leave out --tokenizer",
            ) from error
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count
