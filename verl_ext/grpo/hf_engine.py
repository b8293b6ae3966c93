"""Generation by the trained model itself, through transformers: for models that vLLM does not support."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.grpo.sampling import (
    Completion,
    RolloutEngine,
    SampleRequest,
    SamplingArgs,
    require_finite,
    sample_tokens,
    seeded_uniforms,
)


class HFEngine(RolloutEngine):
    """Generates in batches on each rank independently, with unsharded layers."""

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        batch_size: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        device: str = "cpu",
    ) -> None:
        """Set up generation with a model; collective.

        Args:
            model: the trained model, as FSDP2 modules.
            pad_token_id: pads prompts on the left.
            eos_token_ids: tokens that end a completion.
            batch_size: number of concurrent completions.
            autocast: returns the context for forward passes.
            device: device of the inputs; offloaded parameters are elsewhere.
        """
        self._model, self._pad, self._eos = model, pad_token_id, list(eos_token_ids)
        self._batch_size, self._autocast, self._device = batch_size, autocast, device
        with torch.no_grad(), plain_attention(model), autocast():
            # FSDP determines its root at the first forward pass, and `generate` of a PEFT model bypasses the root
            model(input_ids=torch.tensor([[pad_token_id]], device=device), use_cache=False)

    @torch.no_grad()
    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingArgs) -> Iterator[tuple[int, Completion]]:
        """Prompts of similar length share a batch. All ranks begin and end together."""
        was_training = self._model.training
        self._model.eval()
        order = sorted(range(len(requests)), key=lambda n: (-len(requests[n].prompt_ids), requests[n].prompt_ids))
        try:
            with unsharded_layers(self._model), plain_attention(self._model), self._autocast():
                for start in range(0, len(order), self._batch_size):
                    numbers = order[start : start + self._batch_size]
                    completions = self._batch([requests[number] for number in numbers], sampling)
                    if self.is_interrupted(None):
                        return
                    yield from zip(numbers, completions)
        finally:
            self._model.train(was_training)

    def _batch(self, requests: Sequence[SampleRequest], sampling: SamplingArgs) -> list[Completion]:
        longest = max(len(request.prompt_ids) for request in requests)
        padding = [longest - len(request.prompt_ids) for request in requests]
        prompts = [[self._pad] * pad + list(request.prompt_ids) for request, pad in zip(requests, padding)]
        input_ids = torch.tensor(prompts, device=self._device)
        attention_mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(self._device)
        processor = SeededHFLogitsProcessor([request.seed for request in requests], sampling, self._device)
        tokens = self._generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=self._prompt_cache(requests, input_ids, attention_mask),
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([self._stops]),
            # every rank has the full model, so ranks with fewer or no prompts need no extra forward passes
            synced_gpus=False,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=self._eos,
                pad_token_id=self._pad,
                use_cache=True,
            ),
        )[:, longest:]
        return [self._completion(row, probs) for row, probs in zip(tokens.tolist(), processor.log_probs())]

    def _generate(self, **arguments: Any) -> torch.Tensor:
        """Generate without the model's generation config, which may penalize repetition, for example.

        transformers 5 takes unset settings from it, and peft copies its own to the base model.
        """
        models = [self._model, unwrap_peft(self._model)]
        own = [model.generation_config for model in models]
        try:
            for model in models:
                model.generation_config = GenerationConfig()
            return self._model.generate(**arguments)
        finally:
            for model, settings in zip(models, own):
                model.generation_config = settings

    def _prompt_cache(
        self, requests: Sequence[SampleRequest], input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> DynamicCache | None:
        """Keys and values of all but the prompts' last tokens, computed once per prompt instead of once per request."""
        indices: dict[tuple[int, ...], int] = {}
        prompt_of_request = [indices.setdefault(request.prompt_ids, len(indices)) for request in requests]
        model = unwrap_peft(self._model)
        if len(indices) == len(requests) or input_ids.shape[1] == 1 or not takes_dynamic_cache(model):
            return None
        rows = [prompt_of_request.index(index) for index in range(len(indices))]
        cache, mask = DynamicCache(config=model.config), attention_mask[rows, :-1]
        self._model(
            input_ids=input_ids[rows, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": 1} if model._supports_logits_to_keep() else {}),
        )
        cache.reorder_cache(torch.tensor(prompt_of_request, device=input_ids.device))
        return cache

    def _stops(self, input_ids: torch.Tensor, scores: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Stopping criterion of transformers: ends all rows, (rows,) bool, if the engine is interrupted."""
        return torch.full((len(input_ids),), self.is_interrupted(None), device=input_ids.device)

    def _completion(self, tokens: list[int], log_probs: torch.Tensor) -> Completion:
        ends = [position for position, token in enumerate(tokens) if token in self._eos]
        length = ends[0] + 1 if ends else len(tokens)
        require_finite(log_probs[:length], "check its weights")
        return Completion(tuple(tokens[:length]), log_probs[:length], truncated=not ends)


class SeededHFLogitsProcessor(LogitsProcessor):
    """Samples each row's next token with the row's own random numbers, and masks all other tokens."""

    def __init__(self, seeds: Sequence[int], sampling: SamplingArgs, device: str) -> None:
        """One seed for each row of the batch, and the device of the logits."""
        self._uniforms = torch.stack([seeded_uniforms(seed, sampling.max_tokens) for seed in seeds]).to(device)
        self._sampling = sampling
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """(rows, vocabulary) logits, minus infinity for all but the sampled token."""
        tokens, log_probs = sample_tokens(scores, self._uniforms[:, len(self._log_probs)], self._sampling)
        self._log_probs.append(log_probs[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def log_probs(self) -> torch.Tensor:
        """Log-probabilities of the sampled tokens, (rows, tokens), on the CPU."""
        return torch.stack(self._log_probs, 1).cpu()


def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether the model's forward pass accepts transformers' `DynamicCache`; Mamba, for example, has its own cache."""
    takes_cache = "past_key_values" in inspect.signature(type(model).forward).parameters
    return takes_cache and model._supports_default_dynamic_cache()


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which a model that attends within packed samples attends by plain sdpa."""
    config = unwrap_peft(model).config
    attention = config._attn_implementation
    if attention.endswith("_sdpa"):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = attention


@contextmanager
def unsharded_layers(model: PreTrainedModel) -> Iterator[None]:
    """Keep the full model on every rank, so that forward passes need no other rank; collective on entry and exit."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)
