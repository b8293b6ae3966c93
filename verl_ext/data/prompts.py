"""Prompts for GRPO in verl's RL format: `prompt`, `data_source`, `reward_model`, `extra_info`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_ext.chat_text import decoded_turns
from verl_ext.console import print_line, progress_bar
from verl_ext.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, check_messages, clock_arguments
from verl_ext.data.config import PromptDataConfig, file_list
from verl_ext.data.dataset import (
    TOOLS_FAULT,
    SampleDataset,
    drop_nulls_of_prompt,
    iter_parquet_rows,
    place_of,
    unique_sample_ids,
)
from verl_ext.errors import UserError


class PromptDataset(SampleDataset):
    """Samples with `row`, `sample_id`, `prompt_ids`, `prompt_text` and the columns of the file.

    Args:
        parquet_files: one or more paths.
        tokenizer: a fast tokenizer with a chat template.
        config: the `data` section.
        max_samples: read only the first rows; -1 reads all.
        progress: show a progress bar on a terminal.
        now: the time for a chat template with `strftime_now`; None for the current time.

    Raises:
        UserError: a row is not a prompt or exceeds `data.max_prompt_length`; the message names the file and the row.
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptDataConfig,
        max_samples: int = -1,
        progress: bool = False,
        now: datetime | None = None,
    ) -> None:
        self._config = config
        clock = clock_arguments(tokenizer.chat_template, now)
        self._template = ChatTemplate(tokenizer, {**clock, **config.apply_chat_template_kwargs})
        names = file_list(parquet_files)
        records = list(islice(_records(names), max_samples if max_samples > 0 else None))
        bar = progress_bar(records, desc="reading prompts", unit="prompts", show=progress, leave=False)
        items = [self._item(name, row, record) for name, row, record in bar]
        kept = [item for item in items if item is not None]
        if not kept:
            raise UserError(f"no prompt of {', '.join(names)} is left; raise data.max_prompt_length")
        if len(kept) < len(items) and progress:
            print_line(f"Skipping {len(items) - len(kept)} of {len(items)} prompts, longer than data.max_prompt_length")
        ids = unique_sample_ids(item["sample_id"] for item in kept)
        self._samples = [
            {**item, "row": row, "sample_id": sample_id} for row, (item, sample_id) in enumerate(zip(kept, ids))
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._samples[index]

    def _item(self, name: str, row: int, record: dict[str, Any]) -> dict[str, Any] | None:
        """Convert a row to a prompt; None if it is too long and skipped."""
        try:
            extra = _struct(record, "extra_info")
            _struct(record, "reward_model")
            turns = self._turns(record)
            self._template.require_rendered(turns, prompt=True)
            text = self._template.render(turns, prompt=True)
        except (UserError, *TEMPLATE_ERRORS) as error:
            raise UserError(f"{place_of(name, row, record)} cannot be used: {error}") from error
        ids = tuple(self._template.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > self._config.max_prompt_length:
            if self._config.filter_overlong_prompts:
                return None
            raise UserError(
                f"{place_of(name, row, record)} has a prompt of {len(ids)} tokens, more than data.max_prompt_length="
                f"{self._config.max_prompt_length}; raise it, or skip such rows with data.filter_overlong_prompts=true"
            )
        sample_id = str(extra.get("problem_id") or f"{Path(name).stem}/{row}")
        return {**record, "sample_id": sample_id, "prompt_ids": ids, "prompt_text": text}

    def _turns(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        if record.get("tools") not in (None, "", "[]", []):
            raise UserError("; ".join(TOOLS_FAULT))
        key = self._config.prompt_key
        prompt = decoded_turns(record.get(key))
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return check_messages(prompt, key, is_prompt=True)


@dataclass(frozen=True)
class PromptBatch:
    """One rank's prompts for a step, as samples of a `PromptDataset`; the data loader's `collate_fn`."""

    items: list[dict[str, Any]]

    @property
    def rows(self) -> list[int]:
        """Index of each prompt in the dataset."""
        return [item["row"] for item in self.items]


def load_prompts(
    data: PromptDataConfig, tokenizer: PreTrainedTokenizerBase, progress: bool = False, now: datetime | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Load training and validation prompts; the latter are None if `data.val_files` is null. See `PromptDataset`."""
    train = PromptDataset(data.train_files, tokenizer, data, data.train_max_samples, progress, now)
    if not file_list(data.val_files):
        return train, None
    return train, PromptDataset(data.val_files, tokenizer, data, data.val_max_samples, progress, now)


def _records(names: Iterable[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """File, row and columns of each row."""
    for name in names:
        for row, record in enumerate(iter_parquet_rows(Path(name).expanduser())):
            yield name, row, drop_nulls_of_prompt(record)


def _struct(record: dict[str, Any], column: str) -> dict[str, Any]:
    """The struct in a column; empty if the row has none.

    Raises:
        UserError: the column holds something else.
    """
    value = record.get(column)
    if value is not None and not isinstance(value, dict):
        kind = type(value).__name__
        raise UserError(f"its column '{column}' has type {kind}; write a struct, as in verl's RL format")
    return value or {}
