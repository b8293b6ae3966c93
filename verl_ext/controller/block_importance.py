"""Measures how much a model's loss grows without one of its blocks.

The importance of a block is the increase of the loss of the first reference answer, in nats per token, when that block
alone is skipped, averaged over questions. Block 0 always runs and has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_ext.console import progress_bar
from verl_ext.controller.adapters import VLMAdapter
from verl_ext.controller.space import Configuration
from verl_ext.controller.vlm import fingerprint, matches_fingerprint
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.errors import UserError
from verl_ext.files import parse_json

SCORE_KEYS = ("importance_scores", "merged_scores", "train_scores")
"""Keys of the scores in a file; a file that consists of the scores alone is read too."""


@dataclass(frozen=True)
class BlockImportance:
    """The importance of the blocks of one model.

    Attributes:
        scores: increase of the loss by number of the block.
        num_blocks: of the model.
        model: its fingerprint; None in a file from elsewhere.
    """

    scores: Mapping[int, float]
    num_blocks: int
    model: str | None = None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        content = {"model": self.model, "num_blocks": self.num_blocks, SCORE_KEYS[0]: dict(self.scores)}
        path.write_text(json.dumps(content, indent=2) + "\n")


def load_importance(path: Path, adapter: VLMAdapter) -> BlockImportance:
    """Read a file of scores.

    Raises:
        UserError: the file is missing, has no scores, or is of another model.
    """
    try:
        content = parse_json(path.read_text())
        by_block = next((content[key] for key in SCORE_KEYS if key in content), content)
        scores = {int(block): float(score) for block, score in by_block.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} has no block importance ({error}); create it by `python -m verl_ext.controller.importance`"
        ) from error
    blocks, model = len(adapter.blocks), content.get("model")
    is_complete = set(range(1, blocks)) <= set(scores) <= set(range(blocks))
    if not is_complete or not matches_fingerprint(model, adapter, str(path), blocks):
        raise UserError(
            f"{path} is of another model: it has scores of {len(scores)} blocks, and this model has {blocks}, or as "
            "many with other weights; create it again by `python -m verl_ext.controller.importance`"
        )
    return BlockImportance(scores, blocks, model)


@torch.no_grad()
def reference_loss(
    adapter: VLMAdapter, question: ImageQuestion, configuration: Configuration, encoding: object
) -> float:
    """Mean negative log-likelihood of a question's first reference, in nats per token."""
    inputs = adapter.inputs(question.load_image(), question.question, configuration.tier)
    answer = adapter.tokenizer(question.references[0], add_special_tokens=False)["input_ids"]
    total = 0.0
    with adapter.configured(configuration), adapter.with_encoding(encoding):
        state = adapter.prefill(inputs)
        for position, token in enumerate(answer):
            total -= float(state.logits[0].float().log_softmax(-1)[token])
            if position + 1 < len(answer):
                state = adapter.decode(state, torch.tensor([[token]], device=state.logits.device))
    return total / len(answer)


def measure_importance(adapter: VLMAdapter, questions: Sequence[ImageQuestion]) -> BlockImportance:
    """The importance of each block except block 0, at the highest tier."""
    blocks, top_tier = len(adapter.blocks), len(adapter.tier_sizes) - 1
    space = adapter.space(1, blocks, (adapter.trained_topk,) if adapter.trained_topk else ())
    masks = {0: [True] * blocks} | {
        skipped: [block != skipped for block in range(blocks)] for skipped in range(1, blocks)
    }
    losses = dict.fromkeys(masks, 0.0)
    for question in progress_bar(questions, desc="measuring importance", unit="questions"):
        encoding = adapter.encode(adapter.inputs(question.load_image(), question.question, top_tier))
        for skipped, mask in masks.items():
            losses[skipped] += reference_loss(adapter, question, space.configuration(top_tier, mask), encoding)
    scores = {skipped: (losses[skipped] - losses[0]) / len(questions) for skipped in range(1, blocks)}
    return BlockImportance(scores, blocks, fingerprint(adapter.model))
