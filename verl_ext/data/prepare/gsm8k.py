"""`gsm8k`: grade school math problems in their authors' format become conversations with a checkable answer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_ext.console import progress_bar
from verl_ext.data.prepare.files import Row, read_jsonl, write_parquet
from verl_ext.data.prepare.split import FILES_OF_A_RUN, TRAIN_NAME, VAL_NAME
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.errors import UserError, first_line_of

HELP = "Turn GSM8K into train.parquet (its train split) and val.parquet (its test split)."
EXAMPLE = "gsm8k --source openai/gsm8k --style think --output data/gsm8k"
NEXT = "sft 8 recipe=gsm8k " + FILES_OF_A_RUN
VERSION = 2
STYLES = ("plain", "think")
TASKS = ("sft", "rl")
OUTPUT_OF_SPLIT = {"train": TRAIN_NAME, "test": VAL_NAME}
# Fields of a sample as published: the solution, with calculator calls <<48/2=24>>, then "#### " and the number.
CALCULATOR_CALL = re.compile(r"<<[^<>]*>>")
FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
THINK_INSTRUCTION = (
    "Reason between <think> and </think>, then write only the final number between <answer> and </answer>."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gsm8k`."""
    parser.add_argument(
        "--source",
        default="openai/gsm8k",
        help="directory with train.jsonl and test.jsonl, or a `datasets` name",
    )
    parser.add_argument("--config", default="main", help="configuration of a `datasets` name")
    parser.add_argument(
        "--style",
        choices=STYLES,
        default="plain",
        help="plain: the solution, then '#### number'; "
        "think: the solution in <think>, the number in <answer>, and a prompt that asks for it",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="sft",
        help="sft: chats with the solution; rl: prompts with the number, in verl's RL format",
    )


def run(arguments: argparse.Namespace) -> Prepared:
    """Write both files with the columns `messages`, `answer` and `problem_id`, or those of verl's RL format.

    `answer` is the final number as text without thousands separators. Calculator calls are taken out of the
    solutions, since no calculator answers them when the model is used.

    Raises:
        UserError: the source cannot be loaded, or a sample is not in the published format.
    """
    counts: dict[str, float] = {}
    for split, name in OUTPUT_OF_SPLIT.items():
        rows = list(_convert(_read(arguments.source, arguments.config, split), split, arguments.style))
        if arguments.task == "rl":
            rows = [_to_prompt(row, split) for row in rows]
        write_parquet(Path(arguments.output) / name, rows)
        counts[name.removesuffix(".parquet")] = len(rows)
    return Prepared(list(OUTPUT_OF_SPLIT.values()), counts)


def _read(source: str, config: str, split: str) -> Iterable[Any]:
    if Path(source).is_dir():
        return (value for _, value in read_jsonl(Path(source) / f"{split}.jsonl"))
    import datasets

    try:
        return datasets.load_dataset(source, config, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load {source!r} ({first_line_of(error)}); "
            "give --source a directory with train.jsonl and test.jsonl"
        ) from error


def _convert(samples: Iterable[Any], split: str, style: str) -> Iterator[Row]:
    for index, sample in enumerate(progress_bar(samples, desc=f"converting {split}", unit="rows")):
        if not (isinstance(sample, dict) and {"question", "answer"} <= sample.keys()):
            raise UserError(f"sample {index + 1} of the {split} split has no question and answer; check --source")
        final = FINAL_ANSWER.search(sample["answer"])
        if final is None:
            raise UserError(f"sample {index + 1} of the {split} split does not end in '#### number'; check --source")
        solution = CALCULATOR_CALL.sub("", sample["answer"][: final.start()]).strip()
        number = final.group(1).replace(",", "")
        messages = _messages(sample["question"].strip(), solution, number, style)
        yield {"messages": messages, "answer": number, "problem_id": f"gsm8k/{split}/{index}"}


def _to_prompt(row: Row, split: str) -> Row:
    return {
        "data_source": "openai/gsm8k",
        "prompt": row["messages"][:-1],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"problem_id": row["problem_id"], "split": split},
    }


def _messages(question: str, solution: str, number: str, style: str) -> list[dict[str, str]]:
    prompt, answer = question, f"{solution}\n#### {number}"
    if style == "think":
        # In the user's turn and not in a system turn, which some chat templates refuse.
        prompt = f"{question}\n{THINK_INSTRUCTION}"
        answer = f"<think>{solution}</think>\n<answer>{number}</answer>"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
