"""Chats from parquet files, tokenised once and kept in memory as flat arrays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl_ext.config.inputs import file_list
from verl_ext.data.template import ChatTemplate, Encoded, Message
from verl_ext.errors import UserError

CHUNK = 1000  # chats per call of the tokenizer, which is fast only on many at once


class ChatDataset(Dataset):
    """Single-turn or multi-turn chats; loss falls on assistant tokens including the end-of-turn token.

    verl's `SFTDataset` leaves the end-of-turn token out of the loss and counts the prompt's last token in, and both
    of verl's data sets tokenise at every access and pad to `max_length`; this one does neither.

    Args:
        parquet_files: one path or several.
        tokenizer: a fast tokenizer with a chat template.
        config: the `data` section.
        max_samples: take only the first so many rows; -1 takes all.
        progress: show a progress bar while tokenising, on a terminal.

    Raises:
        UserError: a row that cannot be rendered, has no assistant turn, or is too long with `truncation=error`;
            the message names file and row.
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: DictConfig,
        max_samples: int = -1,
        progress: bool = False,
    ) -> None:
        self.config = config
        kwargs = OmegaConf.to_container(OmegaConf.create(config.apply_chat_template_kwargs))
        self.template = ChatTemplate(tokenizer, kwargs)
        self.sources: list[tuple[str, int]] = []  # (file, row) of each sample, for messages
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for tokens, mask in self._encode_files(file_list(parquet_files), max_samples, progress):
            ids.append(np.asarray(tokens, dtype=np.int32))
            masks.append(np.asarray(mask, dtype=np.uint8))
        self.lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.input_ids = np.concatenate(ids) if ids else np.zeros(0, np.int32)
        self.loss_mask = np.concatenate(masks) if masks else np.zeros(0, np.uint8)
        if not self.loss_mask.any():
            raise UserError(
                f"no row of {file_list(parquet_files)} has a token to learn within data.max_length; raise it"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: `input_ids` (seq,), `loss_mask` (seq,) and its number `row` in the data set."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return {
            "input_ids": torch.from_numpy(self.input_ids[part].astype(np.int64)),
            "loss_mask": torch.from_numpy(self.loss_mask[part].astype(np.int64)),
            "row": int(index),
        }

    def turn_ends(self) -> Counter[int]:
        """How many samples have each token as their last learnt one."""
        learnt = np.flatnonzero(self.loss_mask)
        last = learnt[np.searchsorted(learnt, self.offsets[1:]) - 1]  # at or before each sample's end
        return Counter(self.input_ids[last[last >= self.offsets[:-1]]].tolist())

    def describe(self, indices: Iterable[int]) -> str:
        """Files and rows of samples, as messages name them."""
        rows: dict[str, list[str]] = {}
        for index in indices:
            name, row = self.sources[index]
            rows.setdefault(name, []).append(str(row))
        return "; ".join(f"{name} rows {', '.join(numbers)}" for name, numbers in rows.items())

    def _encode_files(self, names: list[str], max_samples: int, progress: bool) -> Iterator[tuple[list, list]]:
        frames = [(name, pd.read_parquet(Path(name).expanduser())) for name in names]
        total = sum(len(frame) for _, frame in frames)
        left = min(total, max_samples) if max_samples > 0 else total
        with tqdm(
            total=left, desc="tokenising", unit="chats", disable=None if progress else True, leave=False, mininterval=1
        ) as bar:
            for name, frame in frames:
                for first in range(0, min(len(frame), left), CHUNK):
                    records = frame.iloc[first : min(first + CHUNK, left)].to_dict("records")
                    yield from self._encode(name, first, records)
                    bar.update(len(records))
                left -= min(len(frame), left)

    def _encode(self, name: str, first: int, records: list[dict[str, Any]]) -> Iterator[tuple[list, list]]:
        chats = [self._at(name, first + i, self._messages, record) for i, record in enumerate(records)]
        columns = [self._at(name, first + i, self._columns, record) for i, record in enumerate(records)]
        encoded = self.template.encode(chats, columns)
        for row, item in enumerate(encoded, start=first):
            self.sources.append((name, row))
            yield self._at(name, row, self._truncate, item)

    def _at(self, name: str, row: int, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function on a row; what goes wrong names the file and the row."""
        try:
            return function(argument)
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name} row {row} cannot be used: {error}") from error

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        if self.config.multiturn.enable:
            messages = plain(record[self.config.multiturn.messages_key])
        else:
            prompt = pick(record[self.config.prompt_key], self.config.prompt_dict_keys)
            response = pick(record[self.config.response_key], self.config.response_dict_keys)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return check_chat(messages)

    def _columns(self, record: dict[str, Any]) -> dict[str, Any]:
        keys = {"tools": self.config.multiturn.tools_key, "enable_thinking": self.config.multiturn.enable_thinking_key}
        found = {name: plain(record[key]) for name, key in keys.items() if key in record}
        if isinstance(found.get("tools"), str):  # how tools of differing shape fit in one parquet column
            found["tools"] = json.loads(found["tools"])
        return {name: value for name, value in found.items() if value is not None}

    def _truncate(self, encoded: Encoded) -> tuple[list[int], list[int]]:
        if isinstance(encoded, UserError):
            raise encoded
        (tokens, mask), limit = encoded, self.config.max_length
        if len(tokens) <= limit:
            return tokens, mask
        if self.config.truncation == "error":
            raise UserError(
                f"it has {len(tokens)} tokens, more than data.max_length={limit}; "
                "raise it, set data.truncation=right, or drop the row"
            )
        return (tokens[:limit], mask[:limit]) if self.config.truncation == "right" else (tokens[-limit:], mask[-limit:])


def check_chat(messages: Any) -> list[Message]:
    """The turns of a chat with text for content, or a `UserError` that says which turn is wrong."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError("its messages are no list of turns with role and content; prepare the file anew")
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise UserError(f"turn {turn} has no role; give it user, assistant, system or tool")
        message["content"] = text_of(message.get("content"), turn)
        if message["content"] is None and not message.get("tool_calls"):
            raise UserError(f"turn {turn} has no content; drop the row from the file")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("it has no assistant turn; drop the row from the file")
    if messages[0]["role"] == "assistant":
        raise UserError("it begins with the assistant; put a user or system turn before it")
    return messages


def text_of(content: Any, turn: int) -> str | None:
    """A turn's content as text; a list of text parts is joined."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise UserError(f"turn {turn} has content that is not text; this stage trains on text alone")
    return content


def pick(value: Any, keys: Any) -> Any:
    """Descend into a nested column by `prompt_dict_keys` or `response_dict_keys`."""
    for key in keys or ():
        value = value[key]
    return value


def plain(value: Any) -> Any:
    """Arrow's nested arrays and mappings as Python lists and dicts without the null fields that parquet fills in."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None or key == "content"}
    return None if isinstance(value, float) and np.isnan(value) else value
