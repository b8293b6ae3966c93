"""Which blocks a static configuration keeps: found one after the other, by the loss on training questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.configuration import ConfigurationSpace
from verl_ext.controller.importance import answer_loss
from verl_ext.data.questions import ImageQuestion

Masks = dict[int, list[bool]]
"""By the number of blocks that run, which."""


def best_blocks(adapter: VLMAdapter, space: ConfigurationSpace, questions: Sequence[ImageQuestion]) -> Masks:
    """Begin with block 0, and take each time the block with which the references are likeliest.

    It is at the highest tier with all experts. The importance of single blocks does not say this: of two that can stand
    for each other, leaving out one costs nothing.

    Args:
        adapter: of the model.
        space: of the configurations.
        questions: of the training split.

    Returns:
        For `space.min_active` to `space.max_active` blocks, the mask.
    """
    top = len(space.tiers) - 1
    encoded = [(each, adapter.encode(adapter.inputs(each.opened(), each.question, top))) for each in questions]
    mask = [True] + [False] * (space.num_blocks - 1)
    masks = {1: mask}
    total = sum(space.num_blocks - count for count in range(1, space.max_active))
    with tqdm(total=total, desc="choosing blocks", unit="choices", disable=None, mininterval=1) as bar:
        for count in range(2, space.max_active + 1):
            mask = min(_one_more(mask), key=lambda each: _loss(adapter, space, each, encoded, bar))
            masks[count] = mask
    return {count: mask for count, mask in masks.items() if count >= space.min_active}


def _one_more(mask: Sequence[bool]) -> list[list[bool]]:
    left = [block for block, runs in enumerate(mask) if not runs]
    return [[runs or block == added for block, runs in enumerate(mask)] for added in left]


def _loss(
    adapter: VLMAdapter,
    space: ConfigurationSpace,
    mask: Sequence[bool],
    encoded: Sequence[tuple[ImageQuestion, Any]],
    bar: tqdm,
) -> float:
    bar.update()
    configuration = space.configuration(len(space.tiers) - 1, mask)
    return sum(answer_loss(adapter, question, configuration, encoding) for question, encoding in encoded)
