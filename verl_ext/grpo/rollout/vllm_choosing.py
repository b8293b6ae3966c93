"""vLLM's choice of tokens by this project's random numbers. Importing this imports vLLM.

vLLM's own seeded sampling draws a number for each token of the vocabulary, request by request: 2.7 ms for each token on
a CPU with a vocabulary of 49152, a fifth of the time of a rollout. One number for each token is enough.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from verl_ext.grpo.rollout.choosing import choose, uniform_numbers
from verl_ext.grpo.rollout.completion import Draw, Sampling

_SEED, _SAMPLING = "verl_ext_seed", "verl_ext_sampling"


def sampling_params(draw: Draw, sampling: Sampling, end_tokens: list[int]) -> SamplingParams:
    """What vLLM is asked: the only token that `Choosing` leaves, with its value."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=sampling.max_tokens,
        logprobs=0,
        stop_token_ids=end_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={_SEED: draw.seed, _SAMPLING: asdict(sampling)},
    )


@dataclass(frozen=True)
class _Request:
    """One that is under way: its random numbers, and vLLM's list of the tokens that it has so far."""

    sampling: Sampling
    uniform: torch.Tensor
    outputs: list[int]


class Choosing(LogitsProcessor):
    """Leaves each request one token, whose logit is its log-probability.

    With `logprobs_mode=processed_logits` vLLM hands that on as it is. All requests of a batch have one `Sampling`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """See vLLM's class."""
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        """See vLLM's class: it decides."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See vLLM's class."""
        process_dict_updates(self._requests, batch_update, _request_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See vLLM's class; (requests, vocabulary)."""
        if not self._requests:
            return logits  # requests that are not this project's
        requests = [self._requests[row] for row in range(len(logits))]
        # a request whose prompt is not yet whole gets a token that vLLM throws away
        uniform = torch.stack([request.uniform[len(request.outputs)] for request in requests])
        tokens, log_probs = choose(logits, uniform, requests[0].sampling)
        return logits.fill_(-torch.inf).scatter_(1, tokens, log_probs)


def _request_of(params: SamplingParams, prompt: list[int] | None, outputs: list[int]) -> _Request | None:
    asked = params.extra_args or {}
    if _SEED not in asked:
        return None
    sampling = Sampling(**asked[_SAMPLING])
    return _Request(sampling, uniform_numbers(asked[_SEED], sampling.max_tokens), outputs)
