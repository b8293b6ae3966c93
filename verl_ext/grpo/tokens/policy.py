"""A causal language model as the policy: an action is a completion, a decision is a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.grpo.policy import LogProbs, MicroBatch, Policy, Prompt, Sample
from verl_ext.grpo.rollout.completion import Draw, Sampling
from verl_ext.grpo.rollout.engine import RolloutEngine, WeightKeeper
from verl_ext.grpo.rollout.weights import WeightSource
from verl_ext.grpo.seeds import seed_of
from verl_ext.grpo.tokens.forward import completion_log_probs
from verl_ext.grpo.tokens.layout import Layout, length_of

COMPARED_TOKENS = 16
"""Of a completion that is drawn to compare engine and model alone."""


@dataclass(frozen=True)
class TokenModel:
    """What evaluates completions.

    Attributes:
        trained: the model, as FSDP2 modules.
        reference: log-probabilities by the frozen model, given the function that computes them from a model.
        precision: makes the context of a forward pass.
        device: of its inputs.
        entropy_gradient: whether the entropy is part of the loss.
        layout: of its rows.
    """

    trained: PreTrainedModel
    reference: Callable[[Callable[[PreTrainedModel], LogProbs]], LogProbs]
    precision: Callable[[], AbstractContextManager[Any]]
    device: str
    entropy_gradient: bool
    layout: Layout


class TokenPolicy(Policy):
    """Draws completions by an engine, and evaluates them by the model that is trained."""

    figures = ("seq_prompt_len", "seq_completion_len", "seq_total_len")

    def __init__(
        self,
        model: TokenModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutEngine,
        source: WeightSource | None,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """Put the parts together.

        Args:
            model: what is trained.
            tokenizer: its own.
            engine: what draws.
            source: of the engine's weights; None for an engine without any.
            sampling: of training.
            seed: `trainer.seed`.
        """
        self._model, self._tokenizer, self._engine, self._source = model, tokenizer, engine, source
        self._sampling, self._seed = sampling, seed
        self._version: int | None = None
        self.engine_dtype = engine.dtype if isinstance(engine, WeightKeeper) else None

    def begin_drawing(self, version: int) -> dict[str, float]:
        """See `Policy.begin_drawing`."""
        if not isinstance(self._engine, WeightKeeper) or self._source is None:
            return {}
        started, num_bytes = time.perf_counter(), 0
        self._engine.wake()
        if self._version != version:
            num_bytes = self._source.num_bytes
            for bucket in self._source.buckets():
                self._engine.load_bucket(bucket)
            self._engine.end_load()
        self._version = version
        return {"weights/sync_s": time.perf_counter() - started, "weights/bytes": float(num_bytes)}

    def draw(self, prompts: Sequence[Prompt], step: int, *, num_samples: int, greedy: bool = False) -> Iterator[Sample]:
        """See `Policy.draw`."""
        places = [(prompt, number) for prompt in prompts for number in range(num_samples)]
        sampling = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=-1) if greedy else self._sampling
        return self._drawn(places, step, sampling)

    def draw_whole(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """See `Policy.draw_whole`; with `top_p` or `top_k` the engine tells of what these leave, so it draws again."""
        if self._sampling.top_p == 1 and self._sampling.top_k <= 0:
            return list(samples)
        max_tokens = min(COMPARED_TOKENS, self._sampling.max_tokens)
        sampling = replace(self._sampling, top_p=1.0, top_k=-1, max_tokens=max_tokens)
        return list(self._drawn([(sample.prompt, sample.number) for sample in samples], step, sampling))

    def _drawn(self, places: Sequence[tuple[Prompt, int]], step: int, sampling: Sampling) -> Iterator[Sample]:
        draws = [
            Draw(prompt.content["prompt_ids"], seed_of(self._seed, step, prompt.sample_id, number))
            for prompt, number in places
        ]
        for index, completion in self._engine.draw(draws, sampling):
            prompt, number = places[index]
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            yield Sample(prompt, number, replace(completion, text=text))

    def end_drawing(self) -> None:
        """See `Policy.end_drawing`."""
        if isinstance(self._engine, WeightKeeper) and self._engine.forgets_in_sleep:
            self._engine.sleep()
            self._version = None

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """See `Policy.collate`."""
        return self._model.layout.micro_batch(samples)

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """See `Policy.log_probs`."""
        return self._evaluated(self._model.trained, micro_batch)

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Policy.reference_log_probs`."""
        return self._model.reference(lambda model: self._evaluated(model, micro_batch)).values

    def order(self, samples: Sequence[Sample]) -> list[int]:
        """See `Policy.order`."""
        return self._model.layout.order(samples)

    def measure(self, sample: Sample) -> dict[str, float]:
        """See `Policy.measure`: lengths in tokens."""
        total, completion = length_of(sample), len(sample.action.token_ids)
        return dict(zip(self.figures, (total - completion, completion, total)))

    def num_decisions(self, sample: Sample) -> int:
        """See `Policy.num_decisions`."""
        return len(sample.action.token_ids)

    def row(self, sample: Sample) -> dict[str, str]:
        """See `Policy.row`."""
        return {"prompt": sample.prompt.content["prompt_text"], "answer": sample.action.text}

    def close(self) -> None:
        """See `Policy.close`."""
        self._engine.close()

    def _evaluated(self, model: PreTrainedModel, micro_batch: MicroBatch) -> LogProbs:
        tensors = {name: tensor.to(self._model.device) for name, tensor in micro_batch.items()}
        with self._model.precision():
            return completion_log_probs(model, tensors, self._sampling.temperature, self._model.entropy_gradient)
