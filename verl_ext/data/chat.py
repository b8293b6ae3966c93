"""Chats from parquet files, as samples to train on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_ext.data.chat_template import ChatEncoder
from verl_ext.data.config import ChatDataConfig, file_list
from verl_ext.data.dataset import TokenDataset
from verl_ext.data.tokenise import tokenise
from verl_ext.errors import UserError


class ChatDataset(TokenDataset):
    """Single-turn or multi-turn chats; loss falls on assistant tokens including the end-of-turn token.

    verl's `SFTDataset` leaves the end-of-turn token out of the loss and counts the prompt's last token in, and both
    of verl's data sets tokenise at every access and pad to `max_length`; this one does neither.

    Args:
        parquet_files: one path or several.
        tokenizer: a fast tokenizer with a chat template.
        config: the `data` section.
        max_samples: take only the first so many rows; -1 takes all.
        progress: show a progress bar while tokenising, on a terminal.
        token_cache: directory in which tokens are kept; None keeps none.
        now: see `ChatEncoder`.

    Raises:
        UserError: a row that cannot be rendered, has no assistant turn, or is too long with `truncation=error`;
            the message names file and row.
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: ChatDataConfig,
        max_samples: int = -1,
        progress: bool = False,
        token_cache: Path | None = None,
        now: datetime | None = None,
    ) -> None:
        self.names = file_list(parquet_files)
        processes = config.num_tokenizers or len(os.sched_getaffinity(0))
        encoder = ChatEncoder(tokenizer, config, now)
        tokens = tokenise(self.names, encoder, max_samples, token_cache, processes, progress)
        self.tokens, self.lengths = tokens, tokens.lengths
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        # The first token of a sample is predicted from nothing, so it has no loss.
        first = tokens.loss_mask[self.offsets[:-1][self.lengths > 0]]
        if np.count_nonzero(tokens.loss_mask) == np.count_nonzero(first):
            raise UserError(f"no row of {', '.join(self.names)} has a token to learn within data.max_length; raise it")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: `input_ids` (seq,), `loss_mask` (seq,) and its number `row` in the data set."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return {
            "input_ids": torch.from_numpy(self.tokens.input_ids[part].astype(np.int64)),
            "loss_mask": torch.from_numpy(self.tokens.loss_mask[part].astype(np.int64)),
            "row": int(index),
        }

    def final_tokens(self) -> Counter[int]:
        """See `TokenRows`."""
        learnt = np.flatnonzero(self.tokens.loss_mask)
        last = learnt[np.searchsorted(learnt, self.offsets[1:]) - 1]  # at or before each sample's end
        return Counter(self.tokens.input_ids[last[last >= self.offsets[:-1]]].tolist())

    def describe(self, indices: Iterable[int]) -> str:
        """Files and rows of samples, as messages name them."""
        rows: dict[str, list[str]] = {}
        for index in indices:
            rows.setdefault(self.names[self.tokens.files[index]], []).append(str(self.tokens.rows[index]))
        return "; ".join(f"{name} rows {', '.join(numbers)}" for name, numbers in rows.items())
