"""The static configurations that run on every question: a grid, and the controller's most frequent choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from verl_ext.console import progress_bar
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import Configuration, ConfigurationSpace, select_blocks
from verl_ext.data.image_questions import ImageQuestion

NUM_FAVORITES = 4
"""Number of the controller's most frequent choices of blocks and experts to add to the lookup table at every tier."""

Mask = list[bool]
"""Whether each block runs."""


def static_configurations(
    model: AdaptiveModel,
    scores: Mapping[int, float] | None,
    questions: Sequence[ImageQuestion],
    budgets_ms: Sequence[float],
    max_static: int,
    num_searched: int,
) -> list[Configuration]:
    """The grid, and the controller's most frequent choices for training questions, at every tier.

    Args:
        scores: importance of the blocks; None keeps the first blocks.
        questions: questions of the training split.
        max_static: maximum size of the grid.
        num_searched: number of questions for the search of the grid's blocks; 0 keeps the most important blocks.
    """
    space, searched = model.space, questions[:num_searched]
    masks = search_blocks(model.runner, space, searched) if searched else important_blocks(space, scores)
    decisions = Counter(
        replace(model.decide(model.runner.encoded(each, 0), each.question, budget).configuration, tier=0)
        for each in questions
        for budget in budgets_ms
    )
    tiers = range(len(space.tiers))
    favorites = [replace(each, tier=tier) for each, _ in decisions.most_common(NUM_FAVORITES) for tier in tiers]
    statics = {*static_grid(space, masks, max_static), *favorites}
    return sorted(statics, key=lambda each: (space.complexity(each), each.tier, each.blocks, each.topk))


def static_grid(space: ConfigurationSpace, masks: Mapping[int, Mask], max_static: int) -> list[Configuration]:
    """All combinations of tier, mask and top-k (the same for all blocks), by ascending complexity.

    Args:
        masks: a mask for each number of active blocks.
        max_static: maximum size; a larger grid is thinned out evenly, keeping its first and last configuration.
    """
    configurations = [
        space.configuration(tier, mask, topk)
        for tier in range(len(space.tiers))
        for mask in masks.values()
        for topk in space.topk_choices or (None,)
    ]
    distinct = sorted(dict.fromkeys(configurations), key=space.complexity)  # the top-k of block 0 is fixed
    if len(distinct) <= max_static:
        return distinct
    return [distinct[index] for index in np.linspace(0, len(distinct) - 1, max_static).round().astype(int)]


def important_blocks(space: ConfigurationSpace, scores: Mapping[int, float] | None) -> dict[int, Mask]:
    """A mask for each number of active blocks, with the most important blocks, or without scores the first ones."""
    counts = range(space.min_active, space.max_active + 1)
    return {count: select_blocks(count, space.num_blocks, scores) for count in counts}


def search_blocks(runner: VLMRunner, space: ConfigurationSpace, questions: Sequence[ImageQuestion]) -> dict[int, Mask]:
    """Search a mask for each number of active blocks greedily, at the highest tier with all experts.

    Starting with block 0, each step adds the block that gives the most correct answers; the loss of the references
    breaks ties. The importance of single blocks does not suffice: if two blocks can replace each other, skipping either
    costs nothing.
    """
    scorer, top_tier = AnswerScorer(questions), len(space.tiers) - 1

    def accuracy(mask: Mask) -> float:
        bar.update()
        configuration = space.configuration(top_tier, mask)
        return fmean(scorer(each, runner.run(each, configuration).answer) for each in questions)

    def loss(mask: Mask) -> float:
        configuration = space.configuration(top_tier, mask)
        return fmean(runner.reference_loss(each, configuration) for each in questions)

    mask = [True] + [False] * (space.num_blocks - 1)
    masks = {1: mask}
    total = sum(space.num_blocks - count for count in range(1, space.max_active))
    with progress_bar(total=total, desc="choosing blocks", unit="choices") as bar:
        for count in range(2, space.max_active + 1):
            skipped = [block for block, runs in enumerate(mask) if not runs]
            candidates = [[runs or block == added for block, runs in enumerate(mask)] for added in skipped]
            accuracies = [accuracy(each) for each in candidates]
            best = [each for each, value in zip(candidates, accuracies) if value == max(accuracies)]
            mask = best[0] if len(best) == 1 else min(best, key=loss)
            masks[count] = mask
    return {count: mask for count, mask in masks.items() if count >= space.min_active}
