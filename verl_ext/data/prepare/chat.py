"""`chat`: conversations in JSON, CSV or parquet become checked, deduplicated train and validation files."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from verl_ext.console import print_line, progress_bar
from verl_ext.data.dataset import ORIGIN_KEY
from verl_ext.data.prepare.columns import encode_unfaithful_columns
from verl_ext.data.prepare.conversation import (
    COMMAND,
    ColumnKeys,
    Layout,
    detect_layout,
    require_object,
    to_conversation,
)
from verl_ext.data.prepare.exclusion import read_excluded_ids
from verl_ext.data.prepare.files import INPUTS, Row, read_rows
from verl_ext.data.prepare.lengths import count_chars, length_percentiles, token_counter
from verl_ext.data.prepare.split import FILES_OF_A_RUN, TRAIN_NAME, VAL_NAME, add_split_arguments, write_split
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.data.prepare.turns import BadRow
from verl_ext.errors import UserError

HELP = (
    "Turn conversations in the OpenAI, ShareGPT, Alpaca, prompt/response or prompt/completion layout into "
    "train.parquet and val.parquet with a `messages` column. The layout of each file is found by its first row."
)
EXAMPLE = "chat --input mine.jsonl --exclude data/quickstart/problems.jsonl --output data/mine"
NEXT = "sft 2 recipe=smollm2_135m trainer.experiment_name=mine " + FILES_OF_A_RUN
VERSION = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUTS)
    parser.add_argument("--messages-key", metavar="COLUMN", help="column of the turns (default: found)")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column of the user's text (default: found)")
    parser.add_argument("--response-key", metavar="COLUMN", help="column of the answer's text (default: found)")
    parser.add_argument(
        "--metadata", nargs="+", default=[], metavar="COLUMN", help="columns of text to keep and not to train on"
    )
    parser.add_argument("--id-key", default="problem_id", metavar="COLUMN", help="column of ids")
    parser.add_argument("--exclude", metavar="FILE", help="ids to leave out: one a line, or JSONL with --id-key")
    parser.add_argument("--skip-bad", action="store_true", help="count malformed rows instead of stopping")
    parser.add_argument("--tokenizer", metavar="DIR", help="measure lengths in this tokenizer's tokens")
    add_split_arguments(parser)


def run(arguments: argparse.Namespace) -> Prepared:
    """Write both files.

    Raises:
        UserError: a file or row is malformed, `--exclude` cannot match anything, or nothing is left to split.
    """
    _require_apart(arguments)
    counts: Counter[str] = Counter(read=0, bad=0, excluded=0, duplicate=0)
    unit, count = (
        ("chars", count_chars) if arguments.tokenizer is None else ("tokens", token_counter(arguments.tokenizer))
    )
    rows = _keep(list(_read_conversations(arguments, counts)), arguments, counts)
    rows, lengths = _measure(rows, count, arguments, counts)
    # Answers to one problem stay on one side of the split: otherwise validation would measure memory.
    groups = [_group(row.get(arguments.id_key), index) for index, row in enumerate(rows)]
    rows = encode_unfaithful_columns(rows)
    written = write_split(Path(arguments.output), rows, groups, arguments.val_fraction, arguments.seed)
    return Prepared([f"{name}.parquet" for name in written], {**counts, **written, **length_percentiles(lengths, unit)})


def _require_apart(arguments: argparse.Namespace) -> None:
    written = {(Path(arguments.output) / name).resolve() for name in (TRAIN_NAME, VAL_NAME)}
    for name in [*arguments.input, *([arguments.exclude] if arguments.exclude else [])]:
        if Path(name).resolve() in written:
            raise UserError(f"{name} is read, and would be replaced by what is made of it; name another --output")


def _group(problem_id: object, index: int) -> str:
    return f"row {index}" if problem_id is None else f"id {problem_id}"


def _read_conversations(arguments: argparse.Namespace, counts: Counter[str]) -> Iterator[Row]:
    keys = ColumnKeys(arguments.messages_key, arguments.prompt_key, arguments.response_key, tuple(arguments.metadata))
    for name in arguments.input:
        path, notes = Path(name), Counter[str]()
        layout, numbered = _find_layout(path, keys)
        for number, value in progress_bar(numbered, desc=f"reading {path.name}", unit="rows"):
            counts["read"] += 1
            try:
                row = require_object(value)
                conversation = to_conversation(row, layout or detect_layout(row, keys), keys, notes)
            except BadRow as error:
                _skip(error, f"{path} row {number}", arguments, counts)
                continue
            yield {**conversation, ORIGIN_KEY: f"{path.name} row {number}"}
        for note, count in notes.items():
            print_line(f"{path}: {note} in {count} rows")


def _skip(error: BadRow, place: str, arguments: argparse.Namespace, counts: Counter[str]) -> None:
    """Count a bad row with `--skip-bad`; otherwise raise a `UserError` that names it."""
    if not arguments.skip_bad:
        fix = error.fix or f"correct it, or skip such rows with the option --skip-bad of `{COMMAND}`"
        raise UserError(f"{place}: {error}; {fix}") from error
    counts["bad"] += 1


def _measure(
    rows: list[Row], count: Callable[[Row], int], arguments: argparse.Namespace, counts: Counter[str]
) -> tuple[list[Row], list[int]]:
    """The rows that can be measured, and their lengths."""
    kept, lengths = [], []
    for row in progress_bar(rows, desc="measuring lengths", unit="rows"):
        try:
            lengths.append(count(row))
        except BadRow as error:
            _skip(error, row[ORIGIN_KEY], arguments, counts)
        else:
            kept.append(row)
    return kept, lengths


def _find_layout(path: Path, keys: ColumnKeys) -> tuple[Layout | None, Iterator[tuple[int, Any]]]:
    """Tell the layout of a file by its first row that has one; returns it with all rows."""
    seen, numbered = [], read_rows(path)
    for item in numbered:
        seen.append(item)
        try:
            row = require_object(item[1])
            layout = detect_layout(row, keys)
        except BadRow:
            continue
        print_line(f"{path}: {layout.describe(row)}")
        return layout, chain(seen, numbered)
    return None, iter(seen)


def _keep(rows: list[Row], arguments: argparse.Namespace, counts: Counter[str]) -> list[Row]:
    excluded = read_excluded_ids(arguments.exclude, arguments.id_key)
    if excluded and not any(arguments.id_key in row for row in rows):
        raise UserError(f"no row has the column {arguments.id_key!r}, so --exclude cannot work; name it by --id-key")
    kept: dict[str, Row] = {}
    for row in rows:
        if str(row.get(arguments.id_key)) in excluded:
            counts["excluded"] += 1
            continue
        content = json.dumps([row["messages"], row.get("tools")], sort_keys=True, default=str)
        counts["duplicate"] += content in kept
        kept.setdefault(content, row)
    return list(kept.values())
