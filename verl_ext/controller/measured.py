"""The model that a command measures, and the questions that it is measured on."""

from __future__ import annotations

import argparse

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.loading import default_device, load_adapter
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset
from verl_ext.plugins import Plugin


def adapter_from(arguments: argparse.Namespace) -> VLMAdapter:
    """The model, on a GPU and in bfloat16 where there is one."""
    device, dtype = default_device()
    return load_adapter(
        arguments.model,
        arguments.tier_sizes,
        device=device,
        dtype=dtype,
        trust_remote_code=arguments.trust_remote_code,
        own_adapter=None if arguments.adapter is None else Plugin.parse(arguments.adapter, "--adapter"),
    )


def questions_from(arguments: argparse.Namespace) -> list[ImageQuestion]:
    """The questions to measure on."""
    source = QuestionSource(arguments.num_questions, 0, arguments.questions)
    return ImageQuestionDataset({"questions": source}, "train", progress=True).samples
