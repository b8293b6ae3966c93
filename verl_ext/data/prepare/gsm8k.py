"""`gsm8k`: converts grade school math problems in their authors' format to conversations with checkable answers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_ext.console import progress_bar
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.tables import (
    TRAIN_NAME,
    VAL_NAME,
    Row,
    read_jsonl,
    rl_prompt_row,
    run_overrides,
    write_parquet,
)
from verl_ext.errors import UserError, first_line_of

STYLES = ("plain", "think")
TRAINED_BY = {"sft": "sft", "rl": "grpo"}
"""Training commands by task."""
SPLIT_FILES = {"train": TRAIN_NAME, "test": VAL_NAME}
# A sample as published: the solution, with calculator calls such as <<48/2=24>>, then "#### " and the number.
CALCULATOR_CALL = re.compile(r"<<[^<>]*>>")
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
THINK_INSTRUCTION = (
    "Reason between <think> and </think>, then write only the final number between <answer> and </answer>."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gsm8k`."""
    parser.add_argument(
        "--source", default="openai/gsm8k", help="directory with train.jsonl and test.jsonl, or a dataset on the Hub"
    )
    parser.add_argument("--config", default="main", help="configuration of a dataset on the Hub")
    parser.add_argument(
        "--style",
        choices=STYLES,
        default="plain",
        help="plain: the solution, then '#### number'; "
        "think: the solution in <think>, the number in <answer>, and a prompt that asks for it",
    )
    parser.add_argument(
        "--task",
        choices=tuple(TRAINED_BY),
        default="sft",
        help="sft: chats with the solution; rl: prompts with the number, in verl's RL format",
    )


def prepare_gsm8k(arguments: argparse.Namespace) -> PrepareResult:
    """Write both files with the columns `messages`, `answer` and `problem_id`, or the columns of verl's RL format.

    `answer` is the final number as text without thousands separators. Calculator calls are removed from the solutions,
    since no calculator answers them at inference time.

    Raises:
        UserError: the source cannot be loaded, or a sample is not in the published format.
    """
    counts: dict[str, float] = {}
    for split, name in SPLIT_FILES.items():
        rows = list(_convert(_read_split(arguments.source, arguments.config, split), split, arguments.style))
        if arguments.task == "rl":
            rows = [_to_rl_row(row, split) for row in rows]
        write_parquet(Path(arguments.output) / name, rows)
        counts[name.removesuffix(".parquet")] = len(rows)
    files, command = list(SPLIT_FILES.values()), TRAINED_BY[arguments.task]
    return PrepareResult(files, counts, {"command": command}, run_overrides(files))


def _read_split(source: str, config: str, split: str) -> Iterable[Any]:
    if Path(source).is_dir():
        return (value for _, value in read_jsonl(Path(source) / f"{split}.jsonl"))
    import datasets

    try:
        return datasets.load_dataset(source, config, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load {source!r} ({first_line_of(error)}); "
            "set --source to a directory with train.jsonl and test.jsonl"
        ) from error


def _convert(samples: Iterable[Any], split: str, style: str) -> Iterator[Row]:
    for index, sample in enumerate(progress_bar(samples, desc=f"converting {split}", unit="rows")):
        question, worked = map(sample.get, ("question", "answer")) if isinstance(sample, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(worked, str):
            raise UserError(f"sample {index + 1} of the {split} split has no question and answer; check --source")
        final = FINAL_ANSWER.search(worked)
        if final is None:
            raise UserError(f"sample {index + 1} of the {split} split does not end in '#### number'; check --source")
        solution = CALCULATOR_CALL.sub("", worked[: final.start()]).strip()
        number = final.group(1).replace(",", "")
        messages = _messages(question.strip(), solution, number, style)
        yield {"messages": messages, "answer": number, "problem_id": f"gsm8k/{split}/{index}"}


def _messages(question: str, solution: str, number: str, style: str) -> list[dict[str, str]]:
    prompt, answer = question, f"{solution}\n#### {number}"
    if style == "think":
        # In the user turn, because some chat templates refuse system turns.
        prompt = f"{question}\n{THINK_INSTRUCTION}"
        answer = f"<think>{solution}</think>\n<answer>{number}</answer>"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _to_rl_row(row: Row, split: str) -> Row:
    info = {"problem_id": row["problem_id"], "split": split}
    return rl_prompt_row("openai/gsm8k", row["messages"][0]["content"], "math", row["answer"], info)


COMMAND = PrepareCommand(
    name="gsm8k",
    help="Turn GSM8K into train.parquet (its train split) and val.parquet (its test split).",
    example="gsm8k --source openai/gsm8k --style think --output data/gsm8k",
    next_command="{command} 8 recipe=gsm8k",
    version=2,
    add_arguments=add_arguments,
    run=prepare_gsm8k,
)
