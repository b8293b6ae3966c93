"""Requests to rollout engines, and next-token sampling, which is the same in every engine."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from verl_ext.errors import UserError

_BELOW_ONE = 1.0 - 2.0**-40


# Requests and completions


@dataclass(frozen=True)
class SampleRequest:
    """One completion to generate.

    Attributes:
        prompt_ids: tokens of the whole context, rendered by the chat template.
        seed: seed of this completion, so that it does not depend on other requests.
    """

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class SamplingArgs:
    """Sampling parameters, with verl's names.

    Attributes:
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold.
        top_k: number of most likely tokens to sample from; -1 for all.
        max_tokens: maximum length of a completion.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        token_ids: tokens, including the end-of-turn token if sampled.
        log_probs: (tokens,), float32; log-probability of each token at the temperature, without top_p and top_k.
        truncated: whether the completion reached `max_tokens`.
        text: decoded without special tokens.
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor
    truncated: bool
    text: str = ""


def require_finite(log_probs: torch.Tensor, remedy: str) -> None:
    """Refuse a completion whose log-probabilities are not finite, because the model's logits were not.

    Engines check whole completions: reading the result at each token would make a GPU wait.

    Args:
        log_probs: (tokens,), those of the completion.
        remedy: advice to the user.
    """
    if not bool(log_probs.isfinite().all()):
        raise UserError(f"the model's logits are not finite; {remedy}")


class RolloutEngine(ABC):
    """Generates completions."""

    dtype: torch.dtype | None = None
    """dtype of the engine's own weights; None if the trained model itself generates."""
    is_interrupted: Callable[[dist.ProcessGroup | None], bool] = staticmethod(lambda group: False)
    """Whether `generate` must end early; collective over the ranks of a group, which share an engine."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """Allocate memory for generation, and load the trained weights if they changed; collective.

        Args:
            version: number of completed training steps, which identifies the weights.

        Returns:
            Metrics by full name.
        """
        return {}

    @abstractmethod
    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingArgs) -> Iterator[tuple[int, Completion]]:
        """Generate a completion for each request.

        Yields:
            Index of the request and its completion without text, once finished; not all if `is_interrupted`.
        """

    def release_memory(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Release memory that only generation needs, possibly including the weights."""

    def close(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Stop all processes that were started."""


# Random numbers and tokens


def sample_seed(run_seed: int, step: int, sample_id: str, number: int) -> int:
    """The seed of one sample, independent of other samples; 31 bits, which every engine accepts.

    Args:
        run_seed: `trainer.seed`.
        step: training step.
        sample_id: id of the prompt.
        number: index of the sample in its group.
    """
    name = f"{run_seed}/{step}/{number}/{sample_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


def seeded_uniforms(seed: int, count: int) -> torch.Tensor:
    """Random numbers, (count,) float64 in [0, 1): one per token of a completion, derived from its seed alone."""
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.clamp(max=_BELOW_ONE)  # x times a uniform must stay below x


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the next token of each row: the first whose cumulative probability exceeds the row's random number.

    Args:
        logits: (rows, vocabulary).
        uniforms: (rows,) float64, from `seeded_uniforms`, on the device of the logits; unused at temperature 0.
        sampling: sampling parameters of all rows.

    Returns:
        Tokens, (rows, 1), and their log-probabilities at the temperature, (rows, 1), which top_p and top_k do not
        change, so that the trainer can reproduce them; NaN if the logits are not finite.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens, logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    warpers = LogitsProcessorList()
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    filtered = warpers(None, logits)  # they ignore the previous tokens
    sums = filtered.softmax(-1).cumsum(-1, dtype=torch.float64)
    # the first sum above a number below the last sum: its token has a probability above 0
    tokens = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[1] - 1)  # none is above NaN
    return tokens, logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
