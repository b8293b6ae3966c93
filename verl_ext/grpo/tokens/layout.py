"""Samples as the rows of a forward pass: a prompt and a completion in each, or a prompt once with all its completions.

Completions of one prompt in one row see the prompt and themselves, and each begins at the position behind the prompt,
so that their log-probabilities are what they would be in rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from verl_ext.grpo.policy import MicroBatch, Sample

PADDING, PROMPT = -1, 0
"""Segments of a row; a completion's is its place in the row, counted from 1."""
Row = list[Sample]
Cost = Callable[[int, int], float]
"""Of a forward pass, by the number of its rows and their length in tokens."""


@dataclass(frozen=True)
class Layout:
    """How samples become rows.

    Attributes:
        pad_token_id: fills rows.
        cost: by which a prompt is shared where that is cheaper; None where the model cannot share it.
    """

    pad_token_id: int
    cost: Cost | None = None

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        """The cheaper way; samples of one prompt that follow one another can share a row."""
        alone = [[sample] for sample in samples]
        if (cost := self.cost) is None:
            return alone
        together = [list(group) for _, group in groupby(samples, key=lambda sample: sample.prompt.row)]
        return min(together, alone, key=lambda rows: cost(len(rows), _width(rows)))

    def order(self, samples: Sequence[Sample]) -> list[int]:
        """Numbers of the samples so that those that go well together follow one another, the largest first."""
        longest: dict[int, int] = {}
        if self.shares(samples):
            for sample in samples:
                longest[sample.prompt.row] = max(longest.get(sample.prompt.row, 0), length_of(sample))

        def cost(number: int) -> tuple[int, int, int]:
            row = samples[number].prompt.row if longest else 0
            return -longest.get(row, 0), row, -length_of(samples[number])

        return sorted(range(len(samples)), key=cost)

    def shares(self, samples: Sequence[Sample]) -> bool:
        """Whether some of them would share a row."""
        return len(self.rows(samples)) < len(samples)

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """Rows with the prompt padded on its left, so that all completions begin at one place.

        Returns:
            Of (rows, tokens): `input_ids`, `position_ids`, `segments`. Of (samples, completion): `completion_ids`,
            `mask`, `rollout_log_probs`, and `predicted_at`, the place of the token before, counted through all rows.
        """
        rows = self.rows(samples)
        longest = max(len(_prompt(row)) for row in rows)
        filled = [_filled(row, longest) for row in rows]
        width = max(len(row.ids) for row in filled)
        places = [places + number * width for number, row in enumerate(filled) for places in row.predicted_at]
        completions = [torch.tensor(sample.action.token_ids) for sample in samples]
        return {
            "input_ids": _right([row.ids for row in filled], self.pad_token_id),
            "position_ids": _right([row.positions for row in filled], 0),
            "segments": _right([row.segments for row in filled], PADDING),
            "completion_ids": _right(completions, self.pad_token_id),
            "predicted_at": _right(places, 0),
            "mask": _right([torch.ones_like(ids) for ids in completions], 0),
            "rollout_log_probs": _right([sample.action.log_probs for sample in samples], 0),
        }


def length_of(sample: Sample) -> int:
    """Tokens of prompt and completion."""
    return len(sample.prompt.content["prompt_ids"]) + len(sample.action.token_ids)


@dataclass(frozen=True)
class _Filled:
    """One row; `predicted_at` is one tensor for each completion."""

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    predicted_at: list[torch.Tensor]


def _filled(row: Row, longest: int) -> _Filled:
    prompt, padding = _prompt(row), longest - len(_prompt(row))
    ids, positions = [0] * padding + list(prompt), [0] * padding + list(range(len(prompt)))
    segments = [PADDING] * padding + [PROMPT] * len(prompt)
    predicted_at = []
    for number, sample in enumerate(row, start=1):
        tokens = sample.action.token_ids
        # the prompt's last token predicts each completion's first
        predicted_at.append(torch.tensor([longest - 1, *range(len(ids), len(ids) + len(tokens) - 1)][: len(tokens)]))
        ids += tokens
        positions += range(len(prompt), len(prompt) + len(tokens))
        segments += [number] * len(tokens)
    return _Filled(torch.tensor(ids), torch.tensor(positions), torch.tensor(segments), predicted_at)


def _prompt(row: Row) -> Sequence[int]:
    return row[0].prompt.content["prompt_ids"]


def _width(rows: list[Row]) -> int:
    """Tokens of the rows, as `Layout.micro_batch` pads them."""
    behind = max(sum(len(sample.action.token_ids) for sample in row) for row in rows)
    return max(len(_prompt(row)) for row in rows) + behind


def _right(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
