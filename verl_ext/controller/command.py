"""What the commands that measure a model have in common: which model, which questions, where to."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.loading import default_device, load_adapter
from verl_ext.data.question_sources import QuestionSource
from verl_ext.data.questions import ImageQuestion, QuestionDataset
from verl_ext.own_code import FORM, OwnCode


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `adapter_from` and `questions_from` read, and `--output`."""
    parser.add_argument("--model", required=True, help="directory or hub name of the vision-language model")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the model brings (Molmo)")
    parser.add_argument("--adapter", metavar="PLACE:CLASS", help=f"an adapter of your own for the model: {FORM}")
    parser.add_argument(
        "--tier-sizes",
        type=int,
        nargs="+",
        required=True,
        help="what each tier shows of an image: crops for Molmo, such as 3 6 12; pixels for Qwen",
    )
    parser.add_argument("--questions", required=True, help="folder with train*.parquet")
    parser.add_argument("--num-questions", type=int, default=32, help="questions to measure on (default 32)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")


def adapter_from(arguments: argparse.Namespace) -> VLMAdapter:
    """The model, on a GPU and in bfloat16 where there is one."""
    device, dtype = default_device()
    return load_adapter(
        arguments.model,
        arguments.tier_sizes,
        device=device,
        dtype=dtype,
        trust_remote_code=arguments.trust_remote_code,
        own_adapter=None if arguments.adapter is None else OwnCode.named(arguments.adapter, "--adapter"),
    )


def questions_from(arguments: argparse.Namespace) -> list[ImageQuestion]:
    """The questions to measure on."""
    source = QuestionSource(arguments.num_questions, 0, arguments.questions)
    return QuestionDataset({"questions": source}, "train", progress=True).samples
