"""The choice of the next token, the same in every engine: random numbers of each draw's own, and the probabilities."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from verl_ext.errors import UserError
from verl_ext.grpo.rollout.completion import Sampling

_BELOW_ONE = 1.0 - 2.0**-40


def uniform_numbers(seed: int, count: int) -> torch.Tensor:
    """(count,) float64 from 0 to below 1, one for each token of a draw, by the draw's seed alone."""
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.clamp(max=_BELOW_ONE)  # a product with it must stay below the other factor


def choose(scores: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row: where the sum of the probabilities passes the row's random number.

    Args:
        scores: (rows, vocabulary) logits.
        uniform: (rows,) float64, of `uniform_numbers`; not used where the likeliest token is taken.
        sampling: of all rows.

    Returns:
        (rows, 1) tokens, and (rows, 1) their log-probabilities in the distribution that they were drawn from.

    Raises:
        UserError: the scores give no probabilities.
    """
    scores = scores.float()
    if sampling.temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
        return tokens, scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    # these warpers do not look at the tokens so far
    log_probs = _warpers(sampling)(None, scores).log_softmax(-1)
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    if not bool(sums[:, -1].isfinite().all()):
        raise UserError(
            "the model's logits are not finite; set rollout.dtype=bfloat16 or float32, or check its weights"
        )
    # the first sum above a number below the last one: so it is a token of some probability
    tokens = torch.searchsorted(sums, uniform.to(sums.device)[:, None] * sums[:, -1:], right=True)
    return tokens, log_probs.gather(1, tokens)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
