"""`prompts`: converts prompts in JSON, CSV or parquet to verl's RL format for GRPO."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from verl_ext.data.config import SYSTEM_KEYS
from verl_ext.data.dataset import ANSWER_KEYS, ORIGIN_KEY, TOOLS_FAULT
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.conversation import (
    MEDIA_KEYS,
    TOOLS_KEY,
    check_turns,
    from_json_text,
    from_turns_text,
    to_turns,
)
from verl_ext.data.prepare.tables import (
    INPUT_HELP,
    Row,
    RowConverter,
    RowError,
    add_split_arguments,
    distinct_names,
    read_rows,
    refuse_overwritten_inputs,
    run_overrides,
    uncompressed,
    write_split,
)
from verl_ext.errors import UserError

MAX_ANSWER_CHARS = 60
"""Longest ground truth for which the next command suggests `reward_correct`."""
OUTPUT_KEYS = ("data_source", "ability", "reward_model", "extra_info")
"""Columns of verl's RL format other than `prompt`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prompts`."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=INPUT_HELP)
    parser.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="column of the prompt")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count malformed rows instead of stopping")
    add_split_arguments(parser)


def prepare_prompts(arguments: argparse.Namespace) -> PrepareResult:
    """Write the training and validation files.

    Raises:
        UserError: a file or row is malformed, or nothing is left to split.
    """
    refuse_overwritten_inputs(arguments.output, arguments.input)
    counts: Counter[str] = Counter(read=0, bad=0)
    converter = RowConverter("prompts", arguments.skip_bad, counts)
    rows: list[Row] = []
    paths = [Path(name) for name in arguments.input]
    sources = distinct_names([uncompressed(path).with_suffix("") for path in paths])
    for path, name, source in zip(paths, distinct_names(paths), sources):
        to_row = partial(to_prompt_row, prompt_key=arguments.prompt_key, source=source)
        rows += converter.convert(path, name, read_rows(path), to_row)
    # With the same prompt on both sides of the split, validation would measure memorization.
    groups = [json.dumps(row["prompt"], sort_keys=True) for row in rows]
    written = write_split(
        Path(arguments.output), _with_one_type(rows), groups, arguments.val_fraction, arguments.seed, "prompt"
    )
    reward = _fitting_reward([row.get("reward_model", {}).get("ground_truth") for row in rows])
    files = [f"{name}.parquet" for name in written]
    overrides = run_overrides(files, without_val="data.val_files=null data.eval_split=train")
    return PrepareResult(files, {**counts, **written}, {"reward": reward}, overrides)


def to_prompt_row(row: Row, number: int, notes: Counter[str], *, prompt_key: str, source: str) -> Row:
    """Convert one row to verl's RL format.

    Args:
        number: number of the row in its file.
        notes: counts the modified rows, by description of the change.
        prompt_key: column of the prompt, a text or a list of turns.
        source: name of the file without the suffix, different for each file.

    Returns:
        `prompt`, `data_source`, `reward_model` and `ability` if the row has them, and `extra_info` with all other
        columns.

    Raises:
        RowError: there is no prompt, a turn is malformed, or a column has a value of the wrong kind.
    """
    if prompt_key in row and row[prompt_key] is None:
        raise RowError(f"its column {prompt_key!r} is null")
    if prompt_key not in row:
        raise RowError(
            f"it has no prompt in a column {prompt_key!r}; its columns are {', '.join(sorted(row))}",
            "specify the column with --prompt-key (for GRPO data.prompt_key)",
        )
    if media := next((name for name in MEDIA_KEYS if row.get(name)), None):
        raise RowError(f"it has {media}, but only text can be trained on")
    if from_json_text(row.get(TOOLS_KEY)) not in (None, "", []):
        raise RowError(*TOOLS_FAULT)
    answer_key = None if row.get("reward_model") is not None else _first_filled(row, ANSWER_KEYS)
    system_key = _first_filled(row, SYSTEM_KEYS)
    reward_model = _object(row, "reward_model") or ({} if answer_key is None else {"ground_truth": row[answer_key]})
    if reward_model and reward_model.get("ground_truth") is None:
        raise RowError("its reward_model has no ground_truth", "add a correct answer or tests, or remove reward_model")
    found: Row = {
        "data_source": str(row.get("data_source") or source),
        "prompt": _prompt_turns(row[prompt_key], None if system_key is None else row[system_key], notes),
        "extra_info": _extra_info(row, {prompt_key, answer_key, system_key, *OUTPUT_KEYS}, f"{source}/{number}"),
    }
    if row.get("ability") is not None:
        found["ability"] = str(row["ability"])
    if reward_model:
        found["reward_model"] = {"style": "rule", **reward_model}
    return found


def _first_filled(row: Row, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if row.get(name) not in (None, "")), None)


def _prompt_turns(prompt: Any, system: Any, notes: Counter[str]) -> list[Row]:
    turns = from_turns_text(prompt)
    messages = to_turns(turns if isinstance(turns, list) else [{"role": "user", "content": prompt}], notes)
    check_turns(messages, is_prompt=True)
    if not any(message["content"].strip() for message in messages if message["role"] == "user"):
        raise RowError("its prompt is empty")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RowError("it has a system turn and a system column", "keep one of them")
    return [*to_turns([{"role": "system", "content": system}], notes), *messages]


def _extra_info(row: Row, used: set[str | None], problem_id: str) -> Row:
    """`extra_info` with an id for the prompt and the columns that verl's format does not have."""
    info = _object(row, "extra_info")
    rest = {name: value for name, value in row.items() if name not in used and name != ORIGIN_KEY and value is not None}
    if repeated := sorted(info.keys() & rest.keys()):
        raise RowError(f"{repeated[0]!r} is both a column and in extra_info", "remove one")
    return {"problem_id": problem_id, **rest, **info}


def _object(row: Row, name: str) -> Row:
    value = from_json_text(row.get(name))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"its column {name!r} is not an object")
    return {key: item for key, item in value.items() if item is not None}


def _with_one_type(rows: list[Row]) -> list[Row]:
    """Convert the ground truths, and each member of `extra_info`, to a single type, which parquet requires.

    The ground truths 42 and 3.5 become text, because a reward may compare an answer with the text of the number.
    """
    members = dict.fromkeys(name for row in rows for name in row["extra_info"])
    as_text = {name for name in members if not _is_uniform([row["extra_info"].get(name) for row in rows], True)}
    answers_as_text = not _is_uniform([row.get("reward_model", {}).get("ground_truth") for row in rows])
    unified = []
    for row in rows:
        info = {key: _to_text(item) if key in as_text else item for key, item in row["extra_info"].items()}
        changed: Row = {**row, "extra_info": info}
        if "reward_model" in row and answers_as_text:
            reward_model = row["reward_model"]
            changed["reward_model"] = {**reward_model, "ground_truth": _to_text(reward_model["ground_truth"])}
        unified.append(changed)
    return unified


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_uniform(values: list[Any], merges_numbers: bool = False) -> bool:
    """Whether parquet returns these values unchanged: all have one simple type, or all are lists of one kind.

    Args:
        merges_numbers: whether integers next to floats may become floats of equal value.
    """
    for each in {False, merges_numbers}:
        kinds = {_kind(value, each) for value in values if value is not None}
        if len(kinds) <= 1 and not any(kind.endswith("object") for kind in kinds):
            return True
    return False


def _kind(value: Any, merges_numbers: bool) -> str:
    if isinstance(value, list):
        kinds = {_kind(item, merges_numbers) for item in value}
        return f"list of {kinds.pop()}" if len(kinds) == 1 else "object"
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:  # parquet has no larger integers
            return "object"
        return "float" if merges_numbers and abs(value) <= 2**53 else "int"
    return "object" if isinstance(value, dict) or value is None else type(value).__name__


def _fitting_reward(truths: list[Any]) -> str:
    """The reward to suggest for these ground truths: tests, a short answer, or a custom function."""
    from eval_pipeline.judge import ReferenceAnswer
    from eval_pipeline.problems.verl_rl import read_tests

    try:
        tests = [read_tests(truth, "") for truth in truths]
    except UserError:  # some are missing, or have a format that only a custom function can read
        return "path.py:function"
    if not any(isinstance(each, ReferenceAnswer) for each in tests):
        return "code_tests"
    answers = [each.answer for each in tests if isinstance(each, ReferenceAnswer)]
    is_short = all(len(answer) <= MAX_ANSWER_CHARS and "####" not in answer for answer in answers)
    return "reward_correct" if is_short and len(answers) == len(tests) else "path.py:function"


COMMAND = PrepareCommand(
    name="prompts",
    help="Convert prompts with their correct answers or tests to train.parquet and val.parquet for GRPO.",
    example="prompts --input mine.jsonl --output data/mine",
    next_command=(
        "grpo 2 recipe=custom model.partial_pretrain=MODEL reward.functions=[{reward}] trainer.experiment_name=mine"
    ),
    version=3,
    add_arguments=add_arguments,
    run=prepare_prompts,
)
