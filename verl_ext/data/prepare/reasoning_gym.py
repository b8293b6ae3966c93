"""`reasoning_gym`: generates problems of one of its datasets as prompts, whose answers its own scorer judges."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from verl_ext.cli import IntArg
from verl_ext.console import progress_bar
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.tables import TRAIN_NAME, VAL_NAME, Row, rl_prompt_row, run_overrides, write_parquet
from verl_ext.errors import UserError, first_line_of

SEEDS_APART = 10_000_000
"""Distance between the seeds of training, validation and examples: problem i of a dataset has the seed `seed + i`."""
TRIES_PER_PROBLEM = 10
"""Maximum number of generated problems per distinct question."""
Entry = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reasoning_gym`."""
    parser.add_argument("--task", required=True, metavar="NAME", help="dataset, such as needle_haystack")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the dataset, such as max_digits=3",
    )
    parser.add_argument("--train", type=IntArg(0), default=2000, metavar="NUM", help="number of training problems")
    parser.add_argument("--val", type=IntArg(1), default=300, metavar="NUM", help="number of held-out problems")
    parser.add_argument(
        "--shots", type=IntArg(0), default=2, metavar="NUM", help="number of solved examples before each prompt"
    )
    parser.add_argument("--seed", type=IntArg(0, SEEDS_APART - 1), default=0, help="seed of all problems")


def prepare_reasoning_gym(arguments: argparse.Namespace) -> PrepareResult:
    """Write both files in verl's RL format; the training file contains no held-out question.

    Raises:
        UserError: the dataset or a setting does not exist, or the scorer does not accept the dataset's own answers.
    """
    task, settings = arguments.task, dict(map(_setting, arguments.set))
    seeds = [arguments.seed + number * SEEDS_APART for number in range(3)]
    shots = _turns(_entries(task, settings, arguments.shots, seeds[2], "examples"))
    held_out = _entries(task, settings, arguments.val, seeds[1], "held-out problems")
    questions = {entry["question"] for entry in held_out}
    train = _entries(task, settings, arguments.train, seeds[0], "training problems") if arguments.train else []
    written = {TRAIN_NAME: [each for each in train if each["question"] not in questions], VAL_NAME: held_out}
    counts: dict[str, float] = {}
    for name, entries in written.items():
        split = name.removesuffix(".parquet")
        if entries:
            rows = [_to_row(task, split, number, entry, shots) for number, entry in enumerate(entries)]
            write_parquet(Path(arguments.output) / name, rows)
            counts[split] = len(rows)
    files = [f"{split}.parquet" for split in counts]
    return PrepareResult(files, counts, next_overrides=run_overrides(files))


def _setting(text: str) -> tuple[str, Any]:
    """Parse a setting of a dataset; the value is JSON or text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set has {text!r}; write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _entries(task: str, settings: dict[str, Any], num: int, seed: int, what: str) -> list[Entry]:
    """Generate up to `num` problems with distinct questions; the scorer must accept their reference answers."""
    from eval_pipeline.judge.scorers import require_scorer, score

    require_scorer(task)
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, **settings, size=max(TRIES_PER_PROBLEM * num, 1), seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"reasoning_gym cannot create {task} with these settings ({first_line_of(error)}); correct --set"
        ) from error
    found: dict[str, Entry] = {}
    bar = progress_bar(total=num, desc=f"generating {what}", unit="problems")
    for entry in dataset:
        if len(found) == num:
            break
        try:
            text = json.dumps(entry)
        except TypeError as error:
            raise UserError(f"the entries of {task} cannot be stored as JSON ({error}); use another task") from error
        if not isinstance(entry["answer"], str) or score(entry["answer"], task, text) != 1:
            raise UserError(
                f"the scorer of {task} does not give 1 for the reference answer of {entry['question']!r:.200}; use "
                "another task or other settings"
            )
        if entry["question"] not in found:
            found[entry["question"]] = entry
            bar.update()
    bar.close()
    return list(found.values())


def _turns(entries: list[Entry]) -> list[Row]:
    """Solved problems as turns of a chat."""
    return [
        {"role": role, "content": text}
        for entry in entries
        for role, text in (("user", entry["question"]), ("assistant", entry["answer"]))
    ]


def _to_row(task: str, split: str, number: int, entry: Entry, shots: list[Row]) -> Row:
    truth = json.dumps({"reasoning_gym": task, "entry": entry})
    row = rl_prompt_row(
        f"reasoning_gym/{task}", entry["question"], "reasoning", truth, {"problem_id": f"{task}/{split}/{number}"}
    )
    return {**row, "prompt": [*shots, *row["prompt"]]}


COMMAND = PrepareCommand(
    name="reasoning_gym",
    help=(
        "Generate problems with reasoning_gym, whose scorers judge the answers, and write them to train.parquet and "
        "val.parquet."
    ),
    example="reasoning_gym --task letter_counting --set max_words=8 --output data/letter_counting",
    next_command="grpo 2 recipe=smollm2_reasoning trainer.experiment_name=mine",
    version=1,
    add_arguments=add_arguments,
    run=prepare_reasoning_gym,
)
