"""What a vision-language model must offer so that a controller can decide how much of it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters.swap import Remembered, Skipped, swapped
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.data.chat_template import stop_token_ids
from verl_ext.errors import UserError

TIERS = ("low", "medium", "high")
Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Decoding:
    """A sequence in the middle of being decoded.

    Attributes:
        logits: (1, vocabulary), of the next token.
        cache: keys and values of the blocks that run, in the model's own form.
        length: tokens that the cache holds.
    """

    logits: torch.Tensor
    cache: Any
    length: int


class VLMAdapter(ABC):
    """One architecture; an instance holds one model, and changes it only inside `configured` and `seeing`.

    Args:
        model: of this architecture.
        processor: of the same checkpoint.
        tier_sizes: what each tier may show the model of an image, ascending, in the architecture's unit.
    """

    unit: str
    """What `tier_sizes` counts."""

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> None:
        if list(tier_sizes) != sorted(set(tier_sizes)) or not tier_sizes or tier_sizes[0] < 1:
            raise UserError(f"controller.tier_sizes={list(tier_sizes)} must be ascending numbers of {self.unit}")
        self.model, self.processor, self.tier_sizes = model, processor, tuple(tier_sizes)

    # What an architecture defines

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of the language model."""

    @property
    @abstractmethod
    def vision_site(self) -> tuple[nn.Module, str]:
        """The module that holds the vision encoder, and the encoder's name there."""

    @abstractmethod
    def skip(self, index: int) -> Skipped:
        """What stands in the place of a block that does not run."""

    def mixture(self, block: Any) -> Any:
        """A block's mixture of experts, its `mlp` where that has experts; else None."""
        return block.mlp if hasattr(block, "mlp") and hasattr(block.mlp, "experts") else None

    def router(self, mixture: Any) -> Any:
        """What of a mixture holds `top_k`, the experts that each token is routed to and that run."""
        return mixture.gate

    @abstractmethod
    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        """What the model reads of a sample at a tier, for a batch of one, on the model's device."""

    @abstractmethod
    def num_patches(self, inputs: Inputs) -> int:
        """How many patches the vision encoder sees of inputs."""

    @abstractmethod
    def encode(self, inputs: Inputs) -> Any:
        """What the vision encoder returns for inputs; `seeing` takes it."""

    @abstractmethod
    def pooled_vision(self, encoding: Any) -> torch.Tensor:
        """The mean over the patches of the global crop, (vision width,)."""

    @abstractmethod
    def begin(self, inputs: Inputs) -> Decoding:
        """Run the model on a prompt."""

    @abstractmethod
    def go_on(self, decoding: Decoding, token: torch.Tensor) -> Decoding:
        """Run the model on one more token (1, 1)."""

    # What all have in common

    @property
    def vision_encoder(self) -> nn.Module:
        """The vision encoder."""
        parent, name = self.vision_site
        return parent.get_submodule(name)

    @property
    def trained_topk(self) -> int:
        """How many experts a token was routed to in training; 0 for a model without experts."""
        return next((router.top_k for router in self.routers if router is not None), 0)

    @property
    def routers(self) -> list[Any]:
        """Of each block, see `router`; None for a block without experts."""
        mixtures = [self.mixture(block) for block in self.blocks]
        return [None if mixture is None else self.router(mixture) for mixture in mixtures]

    def space(self, min_active: int, max_active: int, topk_choices: Sequence[int] = ()) -> ConfigurationSpace:
        """What a controller may choose of this model.

        Raises:
            UserError: choices of experts for a model that has none, or that do not end with its own.
        """
        topk = self.trained_topk
        if topk_choices and not topk:
            raise UserError(
                f"controller.topk_choices={list(topk_choices)} is given, but {type(self.model).__name__} has no "
                "experts; set it to []"
            )
        if topk and (not topk_choices or topk_choices[-1] != topk):
            raise UserError(
                f"controller.topk_choices={list(topk_choices)} must end with {topk}, to which "
                f"{type(self.model).__name__} routes each token"
            )
        names = TIERS if len(self.tier_sizes) == len(TIERS) else [f"tier {size}" for size in self.tier_sizes]
        return ConfigurationSpace(tuple(names), len(self.blocks), min_active, max_active, tuple(topk_choices))

    @contextmanager
    def configured(self, configuration: Configuration) -> Iterator[None]:
        """Run the model as a configuration says: only its blocks, and in each only its experts.

        The tier is not a matter of the model but of its `inputs`. With all blocks and the trained top-k the model is
        the released one, to the bit.

        Args:
            configuration: of this model's space.
        """
        trained = self.trained_topk
        places: dict[tuple[nn.Module, str], nn.Module] = {}
        topk: list[tuple[Any, int]] = []
        for index, (runs, router) in enumerate(zip(configuration.blocks, self.routers, strict=True)):
            if not runs:
                places[self.blocks, str(index)] = self.skip(index)
            elif router is not None:
                topk.append((router, configuration.topk[index]))
        try:
            with swapped(places):
                for router, k in topk:
                    router.top_k = k
                yield
        finally:
            for router, _ in topk:
                router.top_k = trained

    def seeing(self, encoding: Any) -> AbstractContextManager[None]:
        """Have the model take an image's encoding as it is, in place of encoding the image again."""
        return swapped({self.vision_site: Remembered(self.vision_encoder, encoding)})

    def pooled_language(self, question: str) -> torch.Tensor:
        """The mean over a question's token embeddings, (width,)."""
        tokens = self.tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"]
        embed = self.model.get_input_embeddings()
        return embed(tokens.to(self.model.device))[0].mean(0)

    @property
    def end_tokens(self) -> list[int]:
        """What ends an answer: the tokens of the model's generation settings, and the tokenizer's end of text."""
        return stop_token_ids(getattr(self.model, "generation_config", None), self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The processor's."""
        return self.processor.tokenizer

    @torch.no_grad()
    def generate(self, inputs: Inputs, max_new_tokens: int, end_tokens: Sequence[int]) -> list[int]:
        """The likeliest tokens one by one, up to and without the first that ends a text."""
        decoding = self.begin(inputs)
        tokens: list[int] = []
        while True:
            token = decoding.logits.argmax(-1, keepdim=True)
            if int(token) in end_tokens:
                return tokens
            tokens.append(int(token))
            if len(tokens) == max_new_tokens:
                return tokens
            decoding = self.go_on(decoding, token)
