"""How much a model loses when one of its blocks is left out, and which blocks to keep by that.

The importance of a block is the increase of the loss of the first reference answer, in nats per token, when that block
alone is skipped; the mean over some questions. Block 0 always runs and has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_ext.console import progress_bar
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.loading import fingerprint, is_of_model
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.errors import UserError
from verl_ext.files import parse_json

KEYS = ("importance_scores", "merged_scores", "train_scores")
"""Under which a file may have its scores; a file of nothing else is read too."""


@dataclass(frozen=True)
class Importance:
    """Of the blocks of one model.

    Attributes:
        scores: loss increase by the number of the block.
        num_blocks: of the model.
        model: its fingerprint; None in a file of someone else's.
    """

    scores: Mapping[int, float]
    num_blocks: int
    model: str | None = None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        content = {"model": self.model, "num_blocks": self.num_blocks, KEYS[0]: dict(self.scores)}
        path.write_text(json.dumps(content, indent=2) + "\n")


def load_importance(path: Path, adapter: VLMAdapter) -> Importance:
    """Read a file of scores.

    Raises:
        UserError: there is no such file, it has no scores, or they are another model's.
    """
    try:
        content = parse_json(path.read_text())
        found = next((content[key] for key in KEYS if key in content), content)
        scores = {int(block): float(score) for block, score in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} has no importance of blocks ({error}); make it by `python -m verl_ext.controller.importance`"
        ) from error
    blocks, model = len(adapter.blocks), content.get("model")
    is_complete = set(range(1, blocks)) <= set(scores) <= set(range(blocks))
    if not is_complete or not is_of_model(model, adapter, str(path), blocks):
        raise UserError(
            f"{path} is of another model: it has scores of {len(scores)} blocks, and this one has {blocks} with other "
            "weights or as many; make it anew by `python -m verl_ext.controller.importance`"
        )
    return Importance(scores, blocks, model)


def blocks_to_keep(num_active: int, num_blocks: int, importance: Importance | None) -> list[bool]:
    """Which blocks run when so many do: block 0 and the most important others, or without importance the first ones."""
    scores = importance.scores if importance else {block: -block for block in range(num_blocks)}
    others = sorted(range(1, num_blocks), key=lambda block: -scores[block])[: num_active - 1]
    return [block == 0 or block in others for block in range(num_blocks)]


def cheapest(space: ConfigurationSpace, importance: Importance | None) -> Configuration:
    """The least that can run: the lowest tier, the fewest blocks and the fewest experts."""
    blocks = blocks_to_keep(space.min_active, space.num_blocks, importance)
    return space.configuration(0, blocks, space.topk_choices[0] if space.topk_choices else None)


@torch.no_grad()
def answer_loss(adapter: VLMAdapter, question: ImageQuestion, configuration: Configuration, encoding: object) -> float:
    """Mean negative log-likelihood of a question's first reference, in nats per token."""
    inputs = adapter.inputs(question.load_image(), question.question, configuration.tier)
    answer = adapter.tokenizer(question.references[0], add_special_tokens=False)["input_ids"]
    total = 0.0
    with adapter.configured(configuration), adapter.seeing(encoding):
        decoding = adapter.begin(inputs)
        for place, token in enumerate(answer):
            total -= float(decoding.logits[0].float().log_softmax(-1)[token])
            if place + 1 < len(answer):
                decoding = adapter.go_on(decoding, torch.tensor([[token]], device=decoding.logits.device))
    return total / len(answer)


def measure_importance(adapter: VLMAdapter, questions: Sequence[ImageQuestion]) -> Importance:
    """The importance of each block but block 0, at the highest tier."""
    blocks, top = len(adapter.blocks), len(adapter.tier_sizes) - 1
    space = adapter.space(1, blocks, (adapter.trained_topk,) if adapter.trained_topk else ())
    masks = {0: [True] * blocks} | {left: [block != left for block in range(blocks)] for left in range(1, blocks)}
    losses = dict.fromkeys(masks, 0.0)
    for question in progress_bar(questions, desc="measuring importance", unit="questions"):
        encoding = adapter.encode(adapter.inputs(question.load_image(), question.question, top))
        for left_out, mask in masks.items():
            losses[left_out] += answer_loss(adapter, question, space.configuration(top, mask), encoding)
    scores = {left: (losses[left] - losses[0]) / len(questions) for left in range(1, blocks)}
    return Importance(scores, blocks, fingerprint(adapter.model))
