"""Makes micro-batches of samples; the one place that decides how samples share a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MicroBatch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """What one rank trains on in one step.

    Attributes:
        micro_batches: each with `input_ids`, `attention_mask`, `position_ids` and `loss_mask` of (batch, seq).
        rows: number of each sample in the data set.
    """

    micro_batches: list[MicroBatch]
    rows: list[int]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that count in the loss; the first of a sample has nothing to be predicted from."""
        return sum(int(micro_batch["loss_mask"][:, 1:].sum()) for micro_batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(int(micro_batch["attention_mask"].sum()) for micro_batch in self.micro_batches)


@dataclass(frozen=True)
class MicroBatcher:
    """Groups samples of like length and pads each group to its own longest; the data loader's `collate_fn`.

    Attributes:
        micro_batch_size: samples per forward pass on one rank.
        pad_token_id: fills `input_ids` behind a sample.
    """

    micro_batch_size: int
    pad_token_id: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        # Longest first: a batch that does not fit in memory fails at once, not after most of the step.
        ordered = sorted(samples, key=lambda sample: -len(sample["input_ids"]))
        groups = [ordered[i : i + self.micro_batch_size] for i in range(0, len(ordered), self.micro_batch_size)]
        return Batch([self.pad(group) for group in groups], [sample["row"] for sample in samples])

    def pad(self, samples: Sequence[dict[str, Any]]) -> MicroBatch:
        """Right-pad samples to the longest of them: tensors of (batch, seq)."""

        def stack(name: str, value: int) -> torch.Tensor:
            columns = [sample[name] for sample in samples]
            return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=value)

        input_ids, lengths = stack("input_ids", self.pad_token_id), [len(sample["input_ids"]) for sample in samples]
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        attention_mask = (positions < torch.tensor(lengths)[:, None]).long()
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions * attention_mask,
            "loss_mask": stack("loss_mask", 0),
        }


def validation_micro_batches(dataset: Any, batcher: MicroBatcher, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """This rank's share of the whole data set, no sample dropped, the same number of micro-batches on every rank.

    Ranks must run the same number of forward passes, since each gathers parameters from all; a rank that has run out
    gets its first micro-batch again without loss tokens.
    """
    order = np.argsort(-sample_lengths(dataset), kind="stable")
    groups = [order[i : i + batcher.micro_batch_size] for i in range(0, len(order), batcher.micro_batch_size)]
    for first in range(0, len(groups), num_ranks):
        mine = first + rank < len(groups)
        group = groups[first + rank] if mine else groups[0][:1]
        micro_batch = batcher.pad([dataset[int(index)] for index in group])
        if not mine:
            micro_batch["loss_mask"] = torch.zeros_like(micro_batch["loss_mask"])
        yield micro_batch


def sample_lengths(dataset: Any) -> np.ndarray:
    """Tokens of each sample (num_samples,)."""
    return np.asarray(dataset.lengths)
