"""`quickstart`: instruction-to-code samples, held-out problems, and a tiny model to train on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from verl_ext.cli import IntArg
from verl_ext.console import staged_progress
from verl_ext.data.prepare.files import staging_directory, write_jsonl, write_parquet
from verl_ext.data.prepare.quickstart.problems import to_problem, to_prompt
from verl_ext.data.prepare.quickstart.sampling import Dataset, sample_dataset
from verl_ext.data.prepare.split import TRAIN_NAME, VAL_NAME
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.model_files import save_config, save_tokenizer

HELP = "Make a toy instruction-to-code task, its held-out problems and a 2M-parameter model to train on it."
EXAMPLE = "quickstart --output data/quickstart"
NEXT = "sft 2"
VERSION = 2
EXPECTED_S = {"drawing samples": 1, "making the model": 8, "measuring lengths": 3}
PROBLEMS_NAME = "problems.jsonl"
PROMPTS_NAME, VAL_PROMPTS_NAME = "prompts.parquet", "val_prompts.parquet"
MODEL_NAME = "model"
MIN_SAMPLES, MAX_SAMPLES = 500, 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quickstart`."""
    parser.add_argument(
        "--samples",
        type=IntArg(MIN_SAMPLES, MAX_SAMPLES),
        default=12_000,
        help=f"training samples, {MIN_SAMPLES} to {MAX_SAMPLES}; 2 %% more are for validation",
    )
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the data and of the weights")


def run(arguments: argparse.Namespace) -> Prepared:
    """Write `train.parquet`, `val.parquet`, `prompts.parquet`, `val_prompts.parquet`, `problems.jsonl` and `model/`.

    Raises:
        UserError: the output directory cannot be written to.
    """
    with staged_progress(EXPECTED_S) as begin:
        return _prepare(arguments, begin)


def _prepare(arguments: argparse.Namespace, begin: Callable[[str], None]) -> Prepared:
    output = Path(arguments.output)
    begin("drawing samples")
    dataset = sample_dataset(arguments.samples, arguments.seed)
    write_parquet(output / TRAIN_NAME, dataset.train)
    write_parquet(output / VAL_NAME, dataset.val)
    write_parquet(output / PROMPTS_NAME, [to_prompt(*problem) for problem in dataset.prompts])
    write_parquet(output / VAL_PROMPTS_NAME, [to_prompt(*problem) for problem in dataset.val_prompts])
    problems = [to_problem(family, parameters) for family, parameters in dataset.held_out]
    write_jsonl(output / PROBLEMS_NAME, problems)
    model_files, counts = _write_model(output / MODEL_NAME, dataset, arguments.seed, begin)
    return Prepared(
        [TRAIN_NAME, VAL_NAME, PROMPTS_NAME, VAL_PROMPTS_NAME, PROBLEMS_NAME, *model_files],
        {**_count(dataset), **counts},
    )


def _count(dataset: Dataset) -> dict[str, float]:
    families = {row["family"] for row in dataset.train}
    return {
        "train": len(dataset.train),
        "val": len(dataset.val),
        "prompts": len(dataset.prompts),
        "problems": len(dataset.held_out),
        "families": len(families),
    }


def _write_model(
    directory: Path, dataset: Dataset, seed: int, begin: Callable[[str], None]
) -> tuple[list[str], dict[str, float]]:
    begin("making the model")
    from verl_ext.data.prepare.quickstart.model import build_model
    from verl_ext.data.prepare.quickstart.tokenizer import train_tokenizer

    conversations = [row["messages"] for row in dataset.train]
    tokenizer = train_tokenizer(conversations)
    model = build_model(tokenizer, seed)
    with staging_directory(directory) as staging:
        model.save_pretrained(staging)
        save_config(model.config, staging)
        save_tokenizer(tokenizer, staging)
        files = sorted(f"{MODEL_NAME}/{path.name}" for path in staging.iterdir())
    begin("measuring lengths")
    lengths = [len(tokenizer.apply_chat_template(messages, return_dict=False)) for messages in conversations]
    return files, {
        "vocabulary": len(tokenizer),
        "parameters": model.num_parameters(),
        "mean_tokens": round(sum(lengths) / len(lengths), 1),
        "max_tokens": max(lengths),
    }
