"""Which blocks a static configuration keeps: found one after the other, by the answers to training questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from verl_ext.console import progress_bar
from verl_ext.controller.block_importance import reference_loss
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.image_questions import ImageQuestion

if TYPE_CHECKING:
    from tqdm import tqdm

Mask = list[bool]
"""Of each block, whether it runs."""


@dataclass(frozen=True)
class BlockSearch:
    """At the highest tier with all experts.

    Attributes:
        executor: of the model.
        space: of the configurations.
        questions: of the training split.
    """

    runner: VLMRunner
    space: ConfigurationSpace
    questions: Sequence[ImageQuestion]

    def best(self) -> dict[int, Mask]:
        """Begin with block 0, and take each time the block with which the most answers are right.

        Of equally many the references' loss decides. The importance of single blocks does not say this: of two that can
        stand for each other, leaving out one costs nothing.

        Returns:
            For `space.min_active` to `space.max_active` blocks, the mask.
        """
        space, score = self.space, AnswerScorer(self.questions)
        mask = [True] + [False] * (space.num_blocks - 1)
        masks = {1: mask}
        total = sum(space.num_blocks - count for count in range(1, space.max_active))
        with progress_bar(total=total, desc="choosing blocks", unit="choices") as bar:
            for count in range(2, space.max_active + 1):
                accuracies = [(self._accuracy(each, score, bar), each) for each in _one_more(mask)]
                most, _ = max(accuracies, key=lambda pair: pair[0])
                mask = self._likeliest([each for accuracy, each in accuracies if accuracy == most])
                masks[count] = mask
        return {count: mask for count, mask in masks.items() if count >= space.min_active}

    def _accuracy(self, mask: Mask, score: AnswerScorer, bar: tqdm) -> float:
        bar.update()
        configuration = self._configuration(mask)
        return fmean(score(each, self.runner.run(each, configuration).answer) for each in self.questions)

    def _likeliest(self, masks: Sequence[Mask]) -> Mask:
        return masks[0] if len(masks) == 1 else min(masks, key=self._loss)

    def _loss(self, mask: Mask) -> float:
        configuration, runner = self._configuration(mask), self.runner
        seen = ((each, runner.encoded(each, configuration.tier).encoding) for each in self.questions)
        return fmean(reference_loss(runner.adapter, each, configuration, encoding) for each, encoding in seen)

    def _configuration(self, mask: Mask) -> Configuration:
        return self.space.configuration(len(self.space.tiers) - 1, mask)


def _one_more(mask: Mask) -> list[Mask]:
    left = [block for block, runs in enumerate(mask) if not runs]
    return [[runs or block == added for block, runs in enumerate(mask)] for added in left]
