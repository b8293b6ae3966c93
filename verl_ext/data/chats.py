"""Chats for SFT: tokenizes parquet files once, on all cores, and caches the tokens under a digest of their inputs."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
import torch
import transformers
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from verl_ext.config.schema import as_dict
from verl_ext.console import progress_bar, warn
from verl_ext.data.chat_template import ADVICE, ChatEncoder, ChatTemplate, Tokens
from verl_ext.data.config import ChatDataConfig, file_list
from verl_ext.data.dataset import SampleDataset, TokenDataset, count_parquet_rows, iter_parquet_rows
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import file_digest, user_cache_dir

VERSION = 7
"""Version of the tokenization and of the cache key; increasing it invalidates all cached files."""
CHUNK = 1000
"""Chats per tokenizer call; the tokenizer is fast only in large batches."""
MIN_PER_PROCESS = 10_000
"""Minimum number of chats per process, since a process takes seconds to start."""
ABANDONED_AFTER_S = 24 * 3600
"""Age at which an unfinished file counts as abandoned; other machines may share the directory."""
IN_THE_KEY = (
    *("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "multiturn", "max_length", "truncation"),
    "apply_chat_template_kwargs",
)
Chunk = tuple[int, str, int, list[dict[str, Any]]]
"""Index and name of a file, index of the first row, and the rows."""


def load_chats(
    data: ChatDataConfig, tokenizer: PreTrainedTokenizerBase, progress: bool = False, now: datetime | None = None
) -> tuple[TokenDataset, TokenDataset | None]:
    """Load training and validation set; the latter is None if `data.val_files` is null. `ChatEncoder` defines `now`."""
    if progress and data.custom_cls.path is None:
        warn_of_trained_header(tokenizer, data)
    train = load_chat_files(data.train_files, data, tokenizer, data.train_max_samples, progress, now)
    if not file_list(data.val_files):
        return train, None
    return train, load_chat_files(data.val_files, data, tokenizer, data.val_max_samples, progress, now)


def warn_of_trained_header(tokenizer: PreTrainedTokenizerBase, data: ChatDataConfig) -> None:
    """Warn if the chat template puts the start of the assistant's turn, such as its role, into the loss."""
    header = ChatTemplate(tokenizer, data.apply_chat_template_kwargs).trained_header
    if header:
        warn(
            f"the chat template ignores add_generation_prompt, so {header!r} before each answer is trained on; {ADVICE}"
        )


def load_chat_files(
    files: Any,
    data: ChatDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    progress: bool = False,
    now: datetime | None = None,
) -> TokenDataset:
    """Load a `ChatDataset`, or as in verl the class that `data.custom_cls` names."""
    if data.custom_cls.path is not None:
        return _load_custom_class(files, data, tokenizer, max_samples)
    cache = user_cache_dir() / "tokens" if data.token_cache is None else Path(data.token_cache).expanduser()
    return ChatDataset(files, tokenizer, data, max_samples, progress, cache, now)


def _load_custom_class(
    files: Any, data: ChatDataConfig, tokenizer: PreTrainedTokenizerBase, max_samples: int
) -> TokenDataset:
    from verl_ext.verl_api import load_extern_object

    try:
        dataset_class: Any = load_extern_object(str(data.custom_cls.path), str(data.custom_cls.name))
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise UserError(
            f"data.custom_cls cannot be loaded: {first_line_of(error)}; correct its path or name"
        ) from error
    names = OmegaConf.create(file_list(files))  # verl distinguishes one file from several by this type
    dataset = dataset_class(
        parquet_files=names, tokenizer=tokenizer, config=OmegaConf.create(as_dict(data)), max_samples=max_samples
    )
    unpadded = UnpaddedDataset(dataset)
    if not unpadded.has_loss:
        raise UserError(
            f"{data.custom_cls.name} of data.custom_cls has no token to train on in {', '.join(file_list(files))}; "
            "correct its loss_mask, or raise data.max_length"
        )
    return unpadded


class ChatDataset(TokenDataset):
    """Single-turn or multi-turn chats, with loss on assistant tokens including the end-of-turn token.

    verl's `SFTDataset` excludes the end-of-turn token from the loss and includes the last token of the prompt. Both of
    verl's datasets tokenize on every access and pad to `max_length`; this one does neither.

    Args:
        parquet_files: one or more paths.
        tokenizer: a fast tokenizer with a chat template.
        config: the `data` section.
        max_samples: read only the first rows; -1 reads all.
        progress: whether this process shows a progress bar and warns of truncated samples.
        token_cache: directory of cached tokens; None disables the cache.
        now: see `ChatEncoder`.

    Raises:
        UserError: a row cannot be rendered, has no assistant turn, or is too long with `truncation=error`; the message
            names the file and the row.
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
        self.tokens = load_tokens(self.names, encoder, max_samples, token_cache, processes, progress)
        self.lengths = self.tokens.lengths
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        num_trained = self._num_loss_tokens()
        if not num_trained.any():
            raise UserError(
                f"no row of {', '.join(self.names)} has a token to train on within data.max_length; raise it"
            )
        if progress:
            self._warn_of_lost_tokens(num_trained == 0, config.max_length)

    def _num_loss_tokens(self) -> np.ndarray:
        """Number of tokens with loss of each sample (num_samples,), without its first token, which nothing predicts."""
        counts, mask, is_filled = np.zeros(len(self.lengths), np.int64), self.tokens.loss_mask, self.lengths > 0
        first = self.offsets[:-1][is_filled]
        counts[is_filled] = np.add.reduceat(mask, first, dtype=np.int64) - mask[first]
        return counts

    def _warn_of_lost_tokens(self, is_lost: np.ndarray, max_length: int) -> None:
        """Warn of truncated samples, and of samples that the loss skips altogether.

        Args:
            is_lost: whether a sample has no token to train on (num_samples,).
        """
        num_truncated, num_lost = int(self.tokens.truncated.sum()), int(is_lost.sum())
        if not num_truncated and not num_lost:
            return
        samples, lost = f"{len(self)} samples of {', '.join(self.names)}", ""
        if num_lost:
            first = int(is_lost.argmax())
            where = f" of {self.names[self.tokens.files[first]]}" if len(self.names) > 1 else ""
            lost = f"have no token to train on (first: row {self.tokens.rows[first]}{where})"
        if not num_truncated:
            warn(f"{num_lost} of {samples} {lost}; drop them, or correct the {{% generation %}} marks of the template")
            return
        cut = f"{num_truncated} of {samples} are truncated at data.max_length={max_length}"
        warn(f"{cut}{f', and {num_lost} {lost}' if num_lost else ''}; raise data.max_length")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample: `input_ids` (seq,), `loss_mask` (seq,) and its index `row` in the dataset."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return {
            "input_ids": torch.from_numpy(self.tokens.input_ids[part].astype(np.int64)),
            "loss_mask": torch.from_numpy(self.tokens.loss_mask[part].astype(np.int64)),
            "row": int(index),
        }

    def first_token_from(self, minimum: int) -> tuple[int, int] | None:
        ids = self.tokens.input_ids
        if not len(ids) or ids.max() < minimum:
            return None
        position = int((ids >= minimum).argmax())
        return int(np.searchsorted(self.offsets, position, side="right")) - 1, int(ids[position])

    def final_tokens(self) -> Counter[int]:
        with_loss = np.flatnonzero(self.tokens.loss_mask)
        borders = np.searchsorted(with_loss, self.offsets)  # of the samples, in `with_loss`
        last = with_loss[borders[1:][np.diff(borders) > 0] - 1]
        return Counter(self.tokens.input_ids[last].tolist())

    def describe(self, indices: Iterable[int]) -> str:
        """Files and rows of samples, for messages."""
        rows: dict[str, list[str]] = {}
        for index in indices:
            rows.setdefault(self.names[self.tokens.files[index]], []).append(str(self.tokens.rows[index]))
        return "; ".join(f"{name} rows {', '.join(numbers)}" for name, numbers in rows.items())


class UnpaddedDataset(TokenDataset):
    """Removes the padding to `max_length`, which verl requires, from the samples of a custom dataset class.

    Args:
        dataset: yields `input_ids`, `attention_mask` and `loss_mask`, each (max_length,).

    Attributes:
        has_loss: whether any token has a loss; the first token of a sample has no prediction, so it does not count.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.has_loss = False
        self._final_tokens: Counter[int] = Counter()
        lengths = []
        for sample in (self[index] for index in range(len(dataset))):
            lengths.append(len(sample["input_ids"]))
            self.has_loss = self.has_loss or bool(sample["loss_mask"][1:].any())
            self._final_tokens.update(sample["input_ids"][sample["loss_mask"].bool()][-1:].tolist())
        self.lengths = np.array(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.dataset[index]
        real = sample["attention_mask"].bool()
        tokens = {name: torch.as_tensor(sample[name])[real].long() for name in ("input_ids", "loss_mask")}
        return {**tokens, "row": index}

    def final_tokens(self) -> Counter[int]:
        return self._final_tokens

    def describe(self, indices: Iterable[int]) -> str:
        return f"{type(self.dataset).__name__} rows {', '.join(map(str, indices))}"


def unpadded(dataset: Any) -> SampleDataset:
    """Remove the padding from a dataset in verl's format; return our own datasets unchanged."""
    return dataset if isinstance(dataset, SampleDataset) else UnpaddedDataset(dataset)


@dataclass(frozen=True)
class TokenTable:
    """The concatenated samples of a dataset.

    Attributes:
        input_ids: (num_tokens,) int32.
        loss_mask: (num_tokens,) uint8, 1 for tokens with loss.
        lengths: number of tokens of each sample (num_samples,).
        files: index of each sample's file (num_samples,).
        rows: row of each sample in its file (num_samples,).
        truncated: whether each sample is truncated (num_samples,).
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    files: np.ndarray
    rows: np.ndarray
    truncated: np.ndarray

    @classmethod
    def concatenate(cls, samples: Sequence[Tokens], sources: Sequence[tuple[int, int]]) -> TokenTable:
        """Concatenate samples; `sources` holds the file and row of each sample."""
        files, rows = zip(*sources) if sources else ((), ())
        return cls(
            np.concatenate([tokens for tokens, _, _ in samples]) if samples else np.zeros(0, np.int32),
            np.concatenate([mask for _, mask, _ in samples]) if samples else np.zeros(0, np.uint8),
            np.array([len(tokens) for tokens, _, _ in samples], dtype=np.int64),
            np.array(files, dtype=np.int32),
            np.array(rows, dtype=np.int64),
            np.array([truncated for _, _, truncated in samples], dtype=np.uint8),
        )

    def write(self, path: Path) -> None:
        """Write an Arrow file atomically; a failure leaves nothing behind.

        Raises:
            OSError: the directory is missing, not writable, or full.
        """
        offsets = pa.array(np.concatenate([[0], np.cumsum(self.lengths)]), type=pa.int64())
        batch = pa.record_batch(
            {
                "input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(self.input_ids)),
                "loss_mask": pa.LargeListArray.from_arrays(offsets, pa.array(self.loss_mask)),
                "file": pa.array(self.files),
                "row": pa.array(self.rows),
                "truncated": pa.array(self.truncated),
            }
        )
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # several runs may share the directory
        try:
            with unfinished.open("wb") as sink:
                with pa.ipc.new_file(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> TokenTable:
        """Memory-map an Arrow file without copying; all ranks on a node share the memory.

        Raises:
            OSError: the file is missing or cannot be read.
            ValueError: the file is damaged (`pyarrow.ArrowInvalid` is a subclass).
        """
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            batch = reader.get_batch(0)
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        return cls(
            ids.values.to_numpy(zero_copy_only=True),
            mask.values.to_numpy(zero_copy_only=True),
            np.diff(ids.offsets.to_numpy()),
            batch.column("file").to_numpy(),
            batch.column("row").to_numpy(),
            batch.column("truncated").to_numpy(),
        )


def load_tokens(
    names: list[str], encoder: ChatEncoder, max_samples: int, directory: Path | None, processes: int, progress: bool
) -> TokenTable:
    """Load the tokens of all rows of some files, in order, from the cache if possible.

    Args:
        max_samples: read only the first rows; -1 reads all.
        directory: directory of cached tokens; None disables the cache.
        processes: maximum number of tokenizer processes.
    """
    if directory is None:
        return tokenize(names, encoder, max_samples, processes, progress)
    path = directory / f"{cache_key(names, encoder, max_samples)}.arrow"
    try:
        return TokenTable.read(path)
    except (OSError, ValueError):  # missing or damaged
        table = tokenize(names, encoder, max_samples, processes, progress)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        table.write(path)
        _remove_abandoned(directory)
        return TokenTable.read(path)
    except OSError as error:
        warn(f"the tokenized data cannot be cached in {directory} ({error}); every start tokenizes again")
        return table


def cache_key(names: list[str], encoder: ChatEncoder, max_samples: int) -> str:
    """Digest of all inputs that determine the tokens: files, tokenizer, chat template, its date, and settings."""
    tokenizer = encoder.template.tokenizer
    settings = as_dict(encoder.config)
    content = {
        "versions": [VERSION, transformers.__version__, tokenizers.__version__],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "settings": {name: settings[name] for name in IN_THE_KEY},
        "max_samples": max_samples,
        "files": [file_digest(Path(name).expanduser()) for name in names],
        **({} if encoder.date is None else {"date": encoder.date}),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _remove_abandoned(directory: Path) -> None:
    """Remove unfinished files of processes that were killed while writing."""
    for path in directory.glob("*.arrow.*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()


def tokenize(names: list[str], encoder: ChatEncoder, max_samples: int, processes: int, progress: bool) -> TokenTable:
    """Tokenize the rows of some files; see `load_tokens`."""
    total = sum(count_parquet_rows(Path(name).expanduser()) for name in names)
    total = min(total, max_samples) if max_samples > 0 else total
    samples: list[Tokens] = []
    sources: list[tuple[int, int]] = []
    encoded = _encode_chunks(_chunks(names, total), encoder, min(processes, total // MIN_PER_PROCESS))
    with progress_bar(total=total, desc="tokenizing", unit="chats", show=progress, leave=False) as bar:
        for (number, _, first, records), tokens in encoded:
            samples += tokens
            sources += [(number, row) for row in range(first, first + len(records))]
            bar.update(len(records))
    return TokenTable.concatenate(samples, sources)


def _chunks(names: list[str], max_rows: int) -> Iterator[Chunk]:
    for number, name in enumerate(names):
        rows, first = islice(iter_parquet_rows(Path(name).expanduser()), max_rows), 0
        while records := list(islice(rows, CHUNK)):
            yield number, name, first, records
            first += len(records)
        max_rows -= first


def _encode_chunks(
    chunks: Iterator[Chunk], encoder: ChatEncoder, processes: int
) -> Iterator[tuple[Chunk, list[Tokens]]]:
    """Tokenize chunks, in parallel if `processes` > 1, and yield them in order."""
    if processes < 2:
        for chunk in chunks:
            yield chunk, encoder.encode(*chunk[1:])
        return
    # not forked, because this process already has threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_encoder, (encoder,)) as pool:
        submitted = []
        for chunk in chunks:
            submitted.append((chunk, pool.submit(_encode_here, *chunk[1:])))
            if len(submitted) > 2 * processes:
                first, future = submitted.pop(0)
                yield first, future.result()
        for chunk, future in submitted:
            yield chunk, future.result()


_ENCODER: list[ChatEncoder] = []
"""The encoder of a tokenizer process, set once at its start."""


def _set_encoder(encoder: ChatEncoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
    _ENCODER[:] = [encoder]


def _encode_here(name: str, first: int, records: list[dict[str, Any]]) -> list[Tokens]:
    return _ENCODER[0].encode(name, first, records)
