"""Which configurations run for every question: a grid of the space, and what the controller likes best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from eval_pipeline.adaptive.block_search import BlockSearch, Mask
from eval_pipeline.adaptive.subject import Subject
from verl_ext.controller.block_importance import BlockImportance
from verl_ext.controller.space import Configuration, ConfigurationSpace, select_blocks
from verl_ext.data.image_questions import ImageQuestion

MOST_CHOSEN = 4
"""Choices of blocks and experts that the lookup table has from the controller, at every tier, so that it lacks none."""


def statics_for(
    subject: Subject, questions: Sequence[ImageQuestion], budgets_ms: Sequence[float], most: int, num_searched: int
) -> list[Configuration]:
    """The grid, and what the controller chooses most often for training questions, at every tier.

    Args:
        subject: what is evaluated.
        questions: of the training split.
        budgets_ms: to choose for.
        most: of the grid's configurations.
        num_searched: questions by which the grid's blocks are searched; 0 for the most important ones.
    """
    space, model = subject.space, subject.model
    searched = questions[:num_searched]
    search = BlockSearch(model.runner, space, searched)
    masks = search.best() if searched else important_blocks(space, subject.importance)
    grid = static_configurations(space, masks, most)
    chosen = Counter(
        replace(model.decide(model.runner.encoded(each, 0), each.question, budget).configuration, tier=0)
        for each in questions
        for budget in budgets_ms
    )
    tiers = range(len(space.tiers))
    liked = [replace(each, tier=tier) for each, _ in chosen.most_common(MOST_CHOSEN) for tier in tiers]
    return sorted({*grid, *liked}, key=lambda each: (space.complexity(each), each.tier, each.blocks, each.topk))


def important_blocks(space: ConfigurationSpace, importance: BlockImportance | None) -> dict[int, Mask]:
    """By the number of blocks that run the most important ones, or without importance the first ones."""
    counts = range(space.min_active, space.max_active + 1)
    return {count: select_blocks(count, space.num_blocks, importance) for count in counts}


def static_configurations(space: ConfigurationSpace, masks: Mapping[int, Mask], most: int) -> list[Configuration]:
    """Every tier with every number of blocks and every top-k for all of them, from the least of the model to the most.

    Args:
        space: of the configurations.
        masks: by the number of blocks that run, which.
        most: how many; of more, some are left out evenly, but not the first and the last.
    """
    grid = [
        space.configuration(tier, mask, topk)
        for tier in range(len(space.tiers))
        for mask in masks.values()
        for topk in space.topk_choices or (None,)
    ]
    distinct = sorted(dict.fromkeys(grid), key=space.complexity)  # block 0 alone has one top-k
    if len(distinct) <= most:
        return distinct
    return [distinct[place] for place in np.linspace(0, len(distinct) - 1, most).round().astype(int)]
