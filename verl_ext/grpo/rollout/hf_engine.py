"""Completions by the trained model itself, through transformers: for models that vLLM does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.grpo.rollout.choosing import choose, uniform_numbers
from verl_ext.grpo.rollout.completion import Completion, Draw, Sampling
from verl_ext.grpo.rollout.engine import RolloutEngine
from verl_ext.grpo.tokens.model import logits_of_last, takes_cache


class HfRollout(RolloutEngine):
    """Draws in batches of prompts, each rank by itself: its layers are whole meanwhile."""

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        batch_size: int,
        precision: Any,
        device: str = "cpu",
    ) -> None:
        """Draw from a model; collective.

        Args:
            model: as FSDP2 modules.
            pad_token_id: fills prompts on their left.
            eos_token_ids: end a completion.
            batch_size: completions at a time.
            precision: makes the context of its forward passes.
            device: of its inputs; offloaded parameters lie elsewhere.
        """
        self._model, self._pad, self._eos = model, pad_token_id, list(eos_token_ids)
        self._batch_size, self._precision, self._device = batch_size, precision, device
        with torch.no_grad(), precision():
            # FSDP finds its outermost module at the first forward pass, and `generate` of an adapted model passes it by
            model(input_ids=torch.tensor([[pad_token_id]], device=device), use_cache=False)

    @torch.no_grad()
    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `RolloutEngine.draw`; prompts of like length share a batch. All ranks begin and end together."""
        was_training = self._model.training
        self._model.eval()
        order = sorted(range(len(draws)), key=lambda number: (-len(draws[number].prompt_ids), draws[number].prompt_ids))
        try:
            with whole_layers(self._model), self._precision():
                for start in range(0, len(order), self._batch_size):
                    numbers = order[start : start + self._batch_size]
                    yield from zip(numbers, self._batch([draws[number] for number in numbers], sampling))
        finally:
            self._model.train(was_training)

    def close(self) -> None:
        """See `RolloutEngine.close`; the model is the trainer's."""

    def _generate(self, **arguments: Any) -> torch.Tensor:
        """Generate without the model's own settings, which may forbid repetitions and the like.

        transformers 5 always takes from them what is not set; with adapters peft hands its own on to the model below.
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

    def _batch(self, draws: Sequence[Draw], sampling: Sampling) -> list[Completion]:
        longest = max(len(draw.prompt_ids) for draw in draws)
        padding = [longest - len(draw.prompt_ids) for draw in draws]
        prompts = [[self._pad] * pad + list(draw.prompt_ids) for draw, pad in zip(draws, padding)]
        input_ids = torch.tensor(prompts, device=self._device)
        attention_mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(self._device)
        drawing = Drawing([draw.seed for draw in draws], sampling)
        tokens = self._generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=self._cache_of_prompts(draws, input_ids, attention_mask),
            logits_processor=LogitsProcessorList([drawing]),
            # every rank has the whole model, so one with fewer prompts, or none, need not keep up with the others
            synced_gpus=False,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=self._eos,
                pad_token_id=self._pad,
                use_cache=True,
            ),
        )[:, longest:]
        return [self._completion(row, probs) for row, probs in zip(tokens.tolist(), drawing.log_probs())]

    def _cache_of_prompts(
        self, draws: Sequence[Draw], input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> DynamicCache | None:
        """Keys and values of all but the prompts' last tokens, computed once for each prompt and not for each draw."""
        places: dict[tuple[int, ...], int] = {}
        of_draw = [places.setdefault(draw.prompt_ids, len(places)) for draw in draws]
        model = unwrap_peft(self._model)
        if len(places) == len(draws) or input_ids.shape[1] == 1 or not takes_cache(model):
            return None
        rows = [of_draw.index(place) for place in range(len(places))]
        cache, mask = DynamicCache(config=model.config), attention_mask[rows, :-1]
        self._model(
            input_ids=input_ids[rows, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            **logits_of_last(model, 1),
        )
        cache.reorder_cache(torch.tensor(of_draw, device=input_ids.device))
        return cache

    def _completion(self, tokens: list[int], log_probs: torch.Tensor) -> Completion:
        ends = [place for place, token in enumerate(tokens) if token in self._eos]
        length = ends[0] + 1 if ends else len(tokens)
        return Completion(tuple(tokens[:length]), log_probs[:length], truncated=not ends)


class Drawing(LogitsProcessor):
    """Chooses each sample's next token by random numbers of its own, and leaves `generate` no other choice."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        """One seed for each row of the batch."""
        self._uniform = torch.stack([uniform_numbers(seed, sampling.max_tokens) for seed in seeds])
        self._sampling = sampling
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """(rows, vocabulary) scores, all but the chosen token's minus infinity."""
        tokens, log_probs = choose(scores, self._uniform[:, len(self._log_probs)], self._sampling)
        self._log_probs.append(log_probs[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def log_probs(self) -> torch.Tensor:
        """(rows, tokens) of what was chosen, on the CPU."""
        return torch.stack(self._log_probs, 1).cpu()


@contextmanager
def whole_layers(model: PreTrainedModel) -> Iterator[None]:
    """Every rank has the whole model, so that forward passes need no other rank; collective at both ends."""
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
