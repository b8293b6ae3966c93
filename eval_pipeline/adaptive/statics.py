"""Which configurations run for every question: a grid of the space, and what the controller likes best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eval_pipeline.adaptive.subject import Subject
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.importance import Importance, blocks_to_keep
from verl_ext.data.questions import ImageQuestion

MOST_CHOSEN = 4
"""Choices of blocks and experts that the lookup table has from the controller, at every tier, so that it lacks none."""


def statics_for(
    subject: Subject, questions: Sequence[ImageQuestion], budgets_ms: Sequence[float], most: int
) -> list[Configuration]:
    """The grid, and what the controller chooses most often for training questions, at every tier.

    Args:
        subject: what is evaluated.
        questions: of the training split.
        budgets_ms: to choose for.
        most: of the grid's configurations.
    """
    space, model = subject.space, subject.model
    grid = static_configurations(space, subject.importance, most)
    chosen = Counter(
        replace(model.decide(model.executor.seen(each, 0), each.question, budget).configuration, tier=0)
        for each in questions
        for budget in budgets_ms
    )
    tiers = range(len(space.tiers))
    liked = [replace(each, tier=tier) for each, _ in chosen.most_common(MOST_CHOSEN) for tier in tiers]
    return sorted({*grid, *liked}, key=lambda each: (space.complexity(each), each.tier, each.blocks, each.topk))


def static_configurations(space: ConfigurationSpace, importance: Importance | None, most: int) -> list[Configuration]:
    """Every tier with every number of blocks and every top-k for all of them, from the least of the model to the most.

    Args:
        space: of the configurations.
        importance: by which blocks are kept; None keeps the first ones.
        most: how many; of more, some are left out evenly, but not the first and the last.
    """
    grid = [
        space.configuration(tier, blocks_to_keep(count, space.num_blocks, importance), topk)
        for tier in range(len(space.tiers))
        for count in range(space.min_active, space.max_active + 1)
        for topk in space.topk_choices or (None,)
    ]
    distinct = sorted(dict.fromkeys(grid), key=space.complexity)  # block 0 alone has one top-k
    if len(distinct) <= most:
        return distinct
    return [distinct[place] for place in np.linspace(0, len(distinct) - 1, most).round().astype(int)]
