"""Completions as the rows of a forward pass: prompt and completion in each, or a prompt once with all its completions.

Completions that share a row see the prompt and themselves only, and each starts at the position after the prompt, so
their log-probabilities are those of rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedModel

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.grpo.protocols import MicroBatch, Trajectory

PADDING, PROMPT = -1, 0
"""Segments of a row; a completion's segment is its number in the row, from 1."""
SHARED_PREFIX_ARCHITECTURES = (
    "gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Architectures whose attention depends only on the mask and the positions given; a test covers each."""
Row = list[Trajectory]
Cost = Callable[[int, int], float]
"""Operations of a forward pass by number of rows and their length in tokens."""


@dataclass(frozen=True)
class TokenBatcher:
    """Makes rows of trajectories.

    Attributes:
        pad_token_id: pads rows.
        cost: decides whether sharing a prompt is cheaper; None if the model cannot share it.
    """

    pad_token_id: int
    cost: Cost | None = None

    def rows(self, trajectories: Sequence[Trajectory]) -> list[Row]:
        """The cheaper way; only consecutive trajectories of one prompt can share a row."""
        separate = [[trajectory] for trajectory in trajectories]
        if (cost := self.cost) is None:
            return separate
        shared = [list(group) for _, group in groupby(trajectories, key=lambda each: each.prompt.index)]
        return min(shared, separate, key=lambda rows: cost(len(rows), _width(rows)))

    def sort(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Longest first, so that a micro-batch needs little padding; prompts stay together if they are shared."""
        longest: dict[int, int] = {}
        if self.shares_prefix(trajectories):
            for trajectory in trajectories:
                index = trajectory.prompt.index
                longest[index] = max(longest.get(index, 0), num_tokens(trajectory))

        def key(trajectory: Trajectory) -> tuple[int, int, int]:
            index = trajectory.prompt.index if longest else 0
            return -longest.get(index, 0), index, -num_tokens(trajectory)

        return sorted(trajectories, key=key)

    def shares_prefix(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether some of them would share a row."""
        return len(self.rows(trajectories)) < len(trajectories)

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Rows with the prompt padded on the left, so that all completions start at one column.

        Returns:
            Of (rows, tokens): `input_ids`, `position_ids`, `segments`. Of (trajectories, completion tokens):
            `completion_ids`, `response_mask`, `rollout_log_probs`, and `predicted_at`, the position of the token before
            in the flattened rows.
        """
        rows = self.rows(trajectories)
        longest = max(len(_prompt_ids(row[0])) for row in rows)
        packed = [_pack_row(row, longest) for row in rows]
        width = max(len(row.ids) for row in packed)
        positions = [at + number * width for number, row in enumerate(packed) for at in row.predicted_at]
        completions = [torch.tensor(trajectory.action.token_ids) for trajectory in trajectories]
        return {
            "input_ids": _pad_right([row.ids for row in packed], self.pad_token_id),
            "position_ids": _pad_right([row.positions for row in packed], 0),
            "segments": _pad_right([row.segments for row in packed], PADDING),
            "completion_ids": _pad_right(completions, self.pad_token_id),
            "predicted_at": _pad_right(positions, 0),
            "response_mask": _pad_right([torch.ones_like(ids) for ids in completions], 0),
            "rollout_log_probs": _pad_right([trajectory.action.log_probs for trajectory in trajectories], 0),
        }


def num_tokens(trajectory: Trajectory) -> int:
    """Tokens of prompt and completion."""
    return len(_prompt_ids(trajectory)) + len(trajectory.action.token_ids)


@dataclass(frozen=True)
class _PackedRow:
    """One row; `predicted_at` has a tensor for each completion."""

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    predicted_at: list[torch.Tensor]


def _pack_row(row: Row, longest: int) -> _PackedRow:
    prompt, padding = _prompt_ids(row[0]), longest - len(_prompt_ids(row[0]))
    ids, positions = [0] * padding + list(prompt), [0] * padding + list(range(len(prompt)))
    segments = [PADDING] * padding + [PROMPT] * len(prompt)
    predicted_at = []
    for number, trajectory in enumerate(row, start=1):
        tokens = trajectory.action.token_ids
        # the prompt's last token predicts each completion's first
        predicted_at.append(torch.tensor([longest - 1, *range(len(ids), len(ids) + len(tokens) - 1)][: len(tokens)]))
        ids += tokens
        positions += range(len(prompt), len(prompt) + len(tokens))
        segments += [number] * len(tokens)
    return _PackedRow(torch.tensor(ids), torch.tensor(positions), torch.tensor(segments), predicted_at)


def _prompt_ids(trajectory: Trajectory) -> Sequence[int]:
    return trajectory.prompt.fields["prompt_ids"]


def _width(rows: list[Row]) -> int:
    """Tokens of a row, as `TokenBatcher.collate` pads them."""
    completions = max(sum(len(trajectory.action.token_ids) for trajectory in row) for row in rows)
    return max(len(_prompt_ids(row[0])) for row in rows) + completions


def _pad_right(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def forward_flops(model: PreTrainedModel | PeftModel) -> Cost | None:
    """Operations of a forward pass, for a model whose rows may hold several completions.

    Twice the parameters for each token, and 4 x layers x width of the heads for each pair of tokens of a row, because a
    custom mask skips no pair (Kaplan et al. 2020, arXiv 2001.08361, table 1).

    Returns:
        None for a model that takes no custom mask, or that attends to a window only.
    """
    config = unwrap_peft(model).config
    takes_mask = config._attn_implementation == "sdpa" and config.model_type in SHARED_PREFIX_ARCHITECTURES
    if not takes_mask or any(kind != "full_attention" for kind in _layer_types(config)):
        return None
    per_token = 2 * unwrap_peft(model).num_parameters(exclude_embeddings=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return lambda num_rows, length: num_rows * length * (per_token + per_pair * length)


def _layer_types(config: PretrainedConfig) -> list[str]:
    """The kind of attention of each layer; some attend to a window only."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        return list(named)
    return ["sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"]
