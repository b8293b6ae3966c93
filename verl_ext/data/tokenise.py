"""Tokenises parquet files of chats: once, with all cores, kept by what went into it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from verl_ext.config.schema import as_dict
from verl_ext.console import progress_bar, warn
from verl_ext.data import tokenised
from verl_ext.data.chat_template import ChatEncoder, Tokens
from verl_ext.data.dataset import count_parquet_rows, iter_parquet_rows
from verl_ext.data.tokenised import Tokenised
from verl_ext.files import user_cache_dir

VERSION = 3
"""Of what is made of a row; another one makes every kept file useless."""
CHUNK = 1000
"""Chats per call of the tokenizer, which is fast only on many at once."""
FEWEST_PER_PROCESS = 10_000
"""Chats that are worth a process of their own, which takes seconds to start."""
IN_THE_KEY = (
    *("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "multiturn", "max_length", "truncation"),
    "apply_chat_template_kwargs",
)
Chunk = tuple[int, str, int, list[dict[str, Any]]]
"""Number and name of a file, number of the first row, and the rows."""


def tokenise(
    names: list[str], encoder: ChatEncoder, max_samples: int, directory: Path | None, processes: int, progress: bool
) -> Tokenised:
    """The tokens of all rows of some files, in their order.

    Args:
        names: of the files.
        encoder: of the rows.
        max_samples: take only the first so many rows; -1 takes all.
        directory: where tokens are kept, by the content of all that they depend on; None keeps none.
        processes: most processes that tokenise.
        progress: show a progress bar, on a terminal.
    """
    if directory is None:
        return _tokenise(names, encoder, max_samples, processes, progress)
    path = directory / f"{key_of(names, encoder, max_samples)}.arrow"
    try:
        return tokenised.read(path)
    except (OSError, ValueError):  # there is none, or a damaged one
        made = _tokenise(names, encoder, max_samples, processes, progress)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tokenised.write(made, path)
        return tokenised.read(path)
    except OSError as error:
        warn(f"the tokenized data cannot be cached in {directory} ({error}); every start tokenizes again")
        return made


def cache_directory(setting: str | None) -> Path:
    """`data.token_cache`, with null resolved."""
    if setting is not None:
        return Path(setting).expanduser()
    return user_cache_dir() / "tokens"


def key_of(names: list[str], encoder: ChatEncoder, max_samples: int) -> str:
    """Digest of all that the tokens depend on: the files, the tokenizer, its template, its date, the settings."""
    tokenizer = encoder.template.tokenizer
    settings = as_dict(encoder.config)
    about = {
        "versions": [VERSION, transformers.__version__, tokenizers.__version__],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "settings": {name: settings[name] for name in IN_THE_KEY},
        "max_samples": max_samples,
        "files": [_digest(name) for name in names],
        **({} if encoder.date is None else {"date": encoder.date}),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _digest(name: str) -> str:
    digest = hashlib.sha256()
    with Path(name).expanduser().open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _tokenise(names: list[str], encoder: ChatEncoder, max_samples: int, processes: int, progress: bool) -> Tokenised:
    total = sum(count_parquet_rows(Path(name).expanduser()) for name in names)
    total = min(total, max_samples) if max_samples > 0 else total
    samples: list[Tokens] = []
    places: list[tuple[int, int]] = []
    with progress_bar(total=total, desc="tokenising", unit="chats", show=progress, leave=False) as bar:
        chunks = _chunks(names, total)
        for (number, _, first, records), tokens in _encoded(
            chunks, encoder, min(processes, total // FEWEST_PER_PROCESS)
        ):
            samples += tokens
            places += [(number, row) for row in range(first, first + len(records))]
            bar.update(len(records))
    return tokenised.join(samples, places)


def _chunks(names: list[str], left: int) -> Iterator[Chunk]:
    for number, name in enumerate(names):
        rows, first = islice(iter_parquet_rows(Path(name).expanduser()), left), 0
        while records := list(islice(rows, CHUNK)):
            yield number, name, first, records
            first += len(records)
        left -= first


def _encoded(chunks: Iterator[Chunk], encoder: ChatEncoder, processes: int) -> Iterator[tuple[Chunk, list[Tokens]]]:
    """Each chunk with its tokens, in order; with several processes some chunks are under way at a time."""
    if processes < 2:
        for chunk in chunks:
            yield chunk, encoder.encode(*chunk[1:])
        return
    # not forked: this process has threads by now
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _become_encoder, (encoder,)) as pool:
        under_way = []
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_encode_here, *chunk[1:])))
            if len(under_way) > 2 * processes:
                first, future = under_way.pop(0)
                yield first, future.result()
        for chunk, future in under_way:
            yield chunk, future.result()


_ENCODER: list[ChatEncoder] = []
"""Of a tokenising process, which gets it once."""


def _become_encoder(encoder: ChatEncoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _ENCODER[:] = [encoder]


def _encode_here(name: str, first: int, records: list[dict[str, Any]]) -> list[Tokens]:
    return _ENCODER[0].encode(name, first, records)
