"""`chat`: converts conversations in JSON, CSV or parquet to checked, deduplicated training and validation files."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from pathlib import Path

from verl_ext.console import print_line, progress_bar
from verl_ext.data.dataset import ORIGIN_KEY
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.conversation import ChatColumns, ChatLayout, detect_layout, to_conversation
from verl_ext.data.prepare.tables import (
    INPUT_HELP,
    NumberedRows,
    Row,
    RowConverter,
    RowError,
    add_split_arguments,
    distinct_names,
    encode_mixed_columns,
    read_rows,
    refuse_overwritten_inputs,
    require_object,
    run_overrides,
    write_split,
)
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import require_no_remote_code

PERCENTILES = (50, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    parser.add_argument("--messages-key", metavar="COLUMN", help="column of the turns (default: detected)")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column of the user's text (default: detected)")
    parser.add_argument("--response-key", metavar="COLUMN", help="column of the answer (default: detected)")
    parser.add_argument(
        "--metadata", nargs="+", default=[], metavar="COLUMN", help="text columns to keep without training on them"
    )
    parser.add_argument("--id-key", default="problem_id", metavar="COLUMN", help="column of ids")
    parser.add_argument("--exclude", metavar="FILE", help="ids to exclude: one per line, or JSONL with --id-key")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count malformed rows instead of stopping")
    parser.add_argument("--tokenizer", metavar="DIR", help="measure lengths in tokens of this tokenizer")
    add_split_arguments(parser)


def prepare_chats(arguments: argparse.Namespace) -> PrepareResult:
    """Write the training and validation files.

    Raises:
        UserError: a file or row is malformed, `--exclude` cannot match anything, or nothing is left to split.
    """
    refuse_overwritten_inputs(arguments.output, filter(None, [*arguments.input, arguments.exclude]))
    counts: Counter[str] = Counter(read=0, bad=0, excluded=0, duplicate=0)
    converter = RowConverter("chat", arguments.skip_bad, counts)
    measures_chars = arguments.tokenizer is None
    measure = count_chars if measures_chars else token_counter(arguments.tokenizer)
    excluded = set() if arguments.exclude is None else _read_excluded_ids(arguments.exclude, arguments.id_key)
    rows = list(_read_conversations(arguments, converter))
    rows = _without_excluded(rows, excluded, arguments.id_key, counts)
    rows = _without_duplicates(rows, counts)
    rows, lengths = _measure_lengths(rows, measure, converter)
    groups = _split_groups(rows, arguments.id_key)
    rows = encode_mixed_columns(rows, keep="messages")
    has_ids = any(row.get(arguments.id_key) is not None for row in rows)
    if not has_ids and max(Counter(groups).values(), default=0) > len(rows) / 2:  # such as a task with one prompt
        groups = [f"row {index}" for index in range(len(rows))]
    grouped_by = f"{arguments.id_key} (--id-key)" if has_ids else "prompt"
    written = write_split(Path(arguments.output), rows, groups, arguments.val_fraction, arguments.seed, grouped_by)
    percentiles = length_percentiles(lengths, "chars" if measures_chars else "tokens")
    files = [f"{name}.parquet" for name in written]
    return PrepareResult(files, {**counts, **written, **percentiles}, next_overrides=run_overrides(files))


# Reading


def _read_conversations(arguments: argparse.Namespace, converter: RowConverter) -> Iterator[Row]:
    keys = ChatColumns(arguments.messages_key, arguments.prompt_key, arguments.response_key, tuple(arguments.metadata))
    paths = [Path(name) for name in arguments.input]
    for path, name in zip(paths, distinct_names(paths)):
        layout, rows = _find_layout(path, keys)
        yield from converter.convert(path, name, rows, partial(to_conversation, layout=layout, keys=keys))


def _find_layout(path: Path, keys: ChatColumns) -> tuple[ChatLayout | None, NumberedRows]:
    """The layout of the first row with a known layout, and all rows of the file."""
    seen, rows = [], read_rows(path)
    for item in rows:
        seen.append(item)
        try:
            row = require_object(item[1])
            layout = detect_layout(row, keys)
        except RowError:
            continue
        print_line(f"{path}: {layout.describe(row)}")
        return layout, chain(seen, rows)
    return None, iter(seen)


# Dropping


def _read_excluded_ids(name: str, id_key: str) -> set[str]:
    """Read ids as text from a file with one id per line, or from JSONL with the key `id_key`.

    Raises:
        UserError: the file cannot be read or contains no id, or an object lacks the key.
    """
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")  # a text may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --exclude {name} ({first_line_of(error)}); check its path and format") from error
    ids = {_parse_id(line.strip(), id_key, f"{name} line {n}") for n, line in enumerate(lines, start=1) if line.strip()}
    if not ids:
        raise UserError(f"--exclude {name} contains no id; remove the option or specify a file with one id per line")
    return ids


def _parse_id(line: str, id_key: str, where: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)[id_key])
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object with {id_key!r}; fix it or set --id-key") from error


def _without_excluded(rows: list[Row], excluded: set[str], id_key: str, counts: Counter[str]) -> list[Row]:
    if excluded and not any(id_key in row for row in rows):
        raise UserError(f"no row has the column {id_key!r}, which --exclude needs; specify the column with --id-key")
    kept = [row for row in rows if str(row.get(id_key)) not in excluded]
    counts["excluded"] = len(rows) - len(kept)
    return kept


def _without_duplicates(rows: list[Row], counts: Counter[str]) -> list[Row]:
    unique: dict[str, Row] = {}
    for row in rows:
        unique.setdefault(json.dumps([row["messages"], row.get("tools")], sort_keys=True, default=str), row)
    counts["duplicate"] = len(rows) - len(unique)
    return list(unique.values())


def _split_groups(rows: list[Row], id_key: str) -> list[str]:
    """Name the group of each row: its id, or the first row with the same turns before the assistant's first.

    All answers to a problem stay on one side of the split; otherwise, validation would measure memorization.
    """
    groups: list[str] = []
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        prompt = takewhile(lambda turn: turn["role"] != "assistant", row["messages"])
        number = first.setdefault(json.dumps([*prompt], sort_keys=True, default=str), index)
        groups.append(f"row {number}" if row.get(id_key) is None else f"id {row[id_key]}")
    return groups


# Lengths


def _measure_lengths(
    rows: list[Row], measure: Callable[[Row], int], converter: RowConverter
) -> tuple[list[Row], list[int]]:
    """Measure the rows, and return the valid ones with their lengths."""
    kept, lengths = [], []
    for row in progress_bar(rows, desc="measuring lengths", unit="rows"):
        try:
            lengths.append(measure(row))
        except RowError as error:
            converter.reject(error, row[ORIGIN_KEY])
        else:
            kept.append(row)
    return kept, lengths


def length_percentiles(lengths: Sequence[int], unit: str) -> dict[str, float]:
    """The 50th, 90th and 99th percentile and the maximum, for choosing `data.max_length`; empty without lengths."""
    if not lengths:
        return {}
    import numpy as np  # here, so that --help is fast

    found = np.percentile(lengths, PERCENTILES, method="inverted_cdf")  # returns only lengths that occur
    named = {f"{unit}_p{percent}": int(length) for percent, length in zip(PERCENTILES, found)}
    return {**named, f"{unit}_max": max(lengths)}


def count_chars(row: Row) -> int:
    """Number of characters in all turns."""
    return sum(len(message.get("content") or "") for message in row["messages"])


def token_counter(directory: str) -> Callable[[Row], int]:
    """Return a function that counts the tokens of a row with `messages` and optional `tools`, rendered as in training.

    The function raises `RowError` if the chat template refuses a row.

    Args:
        directory: directory of a tokenizer with a chat template.

    Raises:
        UserError: the tokenizer is missing or has no chat template.
    """
    from transformers import AutoTokenizer

    from verl_ext.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, check_messages
    from verl_ext.rendering import EndlessTemplate

    if not Path(directory).is_dir():
        raise UserError(f"--tokenizer {directory} is not a directory; specify a directory with tokenizer.json")
    require_no_remote_code(directory, trusted=False, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the exception depends on which file is missing or damaged
        raise UserError(
            f"--tokenizer {directory} cannot be loaded ({first_line_of(error)}); specify a model's directory"
        ) from error
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer in {directory} has no chat template; choose a chat model's directory")
    template = ChatTemplate(tokenizer, {})

    def count_tokens(row: Row) -> int:
        columns = {"tools": row["tools"]} if row.get("tools") else {}
        try:
            text = template.render(check_messages(row["messages"]), **columns)
        except EndlessTemplate:  # every other row would also time out
            raise
        except (UserError, *TEMPLATE_ERRORS) as error:
            raise RowError(
                f"the chat template in {directory} cannot render it ({first_line_of(error)})",
                "correct it, skip such rows with the option --skip-bad, or drop --tokenizer",
            ) from error
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count_tokens


COMMAND = PrepareCommand(
    name="chat",
    help=(
        "Turn conversations in the OpenAI, ShareGPT, Alpaca, prompt/response or prompt/completion layout into "
        "train.parquet and val.parquet with a `messages` column. The layout of each file is detected from its first "
        "row."
    ),
    example="chat --input mine.jsonl --exclude data/quickstart/problems.jsonl --output data/mine",
    next_command="sft 2 recipe=smollm2_135m trainer.experiment_name=mine",
    version=4,
    add_arguments=add_arguments,
    run=prepare_chats,
)
