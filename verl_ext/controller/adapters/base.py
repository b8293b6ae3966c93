"""The base class of adapters, through which a controller chooses how much of a vision-language model runs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.config import require_ascending
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.chat_template import stop_token_ids
from verl_ext.errors import UserError

TIER_NAMES = ("low", "medium", "high")
Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class DecodeState:
    """State of a sequence during decoding.

    Attributes:
        logits: logits of the next token, (1, vocabulary).
        cache: keys and values of the active blocks, in the model's own form.
        length: number of tokens in the cache.
    """

    logits: torch.Tensor
    cache: Any
    length: int


@contextmanager
def replace_modules(replacements: Mapping[tuple[nn.Module, str], nn.Module]) -> Iterator[None]:
    """Replace modules, given by parent and name, within the context."""
    originals = {place: place[0]._modules[place[1]] for place in replacements}
    try:
        for (parent, name), module in replacements.items():
            parent._modules[name] = module
        yield
    finally:
        for (parent, name), original in originals.items():
            parent._modules[name] = original


class SkippedBlock(nn.Module):
    """Replaces a skipped transformer block: hidden states pass through, and nothing is cached.

    Args:
        output: creates the return value of a block from its hidden states.
    """

    def __init__(self, output: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._output = output

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the unchanged hidden states in the format of a block's output."""
        return self._output(hidden_states)


class CachedVisionEncoder(nn.Module):
    """Replaces a vision encoder and returns a precomputed output; keeps the encoder's other attributes."""

    def __init__(self, encoder: nn.Module, output: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_encoder", encoder)  # not a child, because its parameters belong to the model
        self._output = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_encoder"), name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """A copy of the output, because Qwen-VL models replace parts of it."""
        return copy.copy(self._output)


def setting_name(section: str | None, key: str) -> str:
    """The name of a setting in messages.

    Args:
        section: section of the configuration with the key; None if it is a command's option.
    """
    return f"--{key.replace('_', '-')}" if section is None else f"{section}.{key}"


class VLMAdapter(ABC):
    """Base class of adapters. An adapter modifies its model only within `configured` and `with_encoding`.

    Args:
        model: a model of this architecture.
        processor: processor of the same checkpoint.
        tier_sizes: image size of each tier, ascending, in the architecture's unit.
    """

    unit: str
    """Unit of `tier_sizes`."""

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> None:
        self.model, self.processor, self.tier_sizes = model, processor, tuple(tier_sizes)

    # What an architecture defines

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of the language model."""

    @property
    @abstractmethod
    def vision_site(self) -> tuple[nn.Module, str]:
        """The parent module of the vision encoder, and the name of the encoder in it."""

    @abstractmethod
    def skipped_block(self, index: int) -> SkippedBlock:
        """The replacement of a skipped block."""

    def mixture(self, block: Any) -> Any:
        """The mixture of experts of a block, or None; by default, the block's `mlp` if it has `experts`."""
        return block.mlp if hasattr(block, "mlp") and hasattr(block.mlp, "experts") else None

    def router(self, mixture: Any) -> Any:
        """The module of a mixture with the attribute `top_k`, the number of experts per token."""
        return mixture.gate

    @abstractmethod
    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        """Inputs of the model for a sample at a tier: a batch of one on the model's device."""

    @abstractmethod
    def num_patches(self, inputs: Inputs) -> int:
        """Number of patches that the vision encoder processes."""

    @abstractmethod
    def encode(self, inputs: Inputs) -> Any:
        """Output of the vision encoder, for `with_encoding`."""

    @abstractmethod
    def pooled_vision(self, encoding: Any) -> torch.Tensor:
        """Mean over the patches of the global crop, (vision_width,)."""

    @abstractmethod
    def prefill(self, inputs: Inputs) -> DecodeState:
        """Run the model on a prompt."""

    @abstractmethod
    def decode(self, state: DecodeState, token: torch.Tensor) -> DecodeState:
        """Run the model on one more token, (1, 1)."""

    def check_tiers(self, key: str) -> None:
        """Refuse tiers that are not ascending, or that the architecture cannot distinguish.

        Args:
            key: key that sets the tiers, for messages.

        Raises:
            UserError: the tiers cannot be used.
        """
        sizes = list(self.tier_sizes)
        if sizes != sorted(set(sizes)) or not sizes or sizes[0] < 1:
            raise UserError(f"{key}={sizes} must be ascending numbers of {self.unit}")

    # What all architectures share

    @property
    def vision_encoder(self) -> nn.Module:
        """The vision encoder."""
        parent, name = self.vision_site
        return parent.get_submodule(name)

    @property
    def trained_topk(self) -> int:
        """Experts per token of the released model; 0 without experts."""
        return next((router.top_k for router in self.routers if router is not None), 0)

    @property
    def routers(self) -> list[Any]:
        """The router of each block, see `router`; None for a block without experts."""
        mixtures = [self.mixture(block) for block in self.blocks]
        return [None if mixture is None else self.router(mixture) for mixture in mixtures]

    def space(
        self,
        min_active: int,
        max_active: int | None,
        topk_choices: Sequence[int] = (),
        section: str | None = "controller",
    ) -> ConfigurationSpace:
        """The configurations of this model that a controller can select.

        Args:
            max_active: most active blocks; None for all blocks of the model.
            section: see `setting_name`.

        Raises:
            UserError: `topk_choices` is not ascending, is set for a model without experts, or does not end with the
                model's own top-k, or the numbers of blocks do not fit the model.
        """
        topk, num_blocks = self.trained_topk, len(self.blocks)
        least, most, choices = (setting_name(section, name) for name in ("min_active", "max_active", "topk_choices"))
        require_ascending(choices, topk_choices, may_be_empty=True)
        if topk_choices and not topk:
            fix = "omit it" if section is None else "set it to []"
            raise UserError(
                f"{choices}={list(topk_choices)} is set, but {type(self.model).__name__} has no experts; {fix}"
            )
        if topk and (not topk_choices or topk_choices[-1] != topk):
            raise UserError(
                f"{choices}={list(topk_choices)} must end with {topk}, the number of experts per token of "
                f"{type(self.model).__name__}"
            )
        if max_active is None and min_active > num_blocks:
            raise UserError(f"{least}={min_active} exceeds the model's {num_blocks} blocks; lower it")
        if max_active is not None and not min_active <= max_active <= num_blocks:
            raise UserError(
                f"{least}={min_active} and {most}={max_active} must be between 1 and the model's {num_blocks} blocks, "
                "and the first must not exceed the second"
            )
        has_usual_tiers = len(self.tier_sizes) == len(TIER_NAMES)
        names = TIER_NAMES if has_usual_tiers else [f"tier {size}" for size in self.tier_sizes]
        upper = num_blocks if max_active is None else max_active
        return ConfigurationSpace(tuple(names), num_blocks, min_active, upper, tuple(topk_choices))

    @contextmanager
    def configured(self, configuration: Configuration) -> Iterator[None]:
        """Run only the blocks and experts of the configuration within the context.

        The tier affects `inputs`, not the model. With all blocks and the pretrained top-k, outputs are bitwise equal to
        the outputs of the released model.
        """
        trained = self.trained_topk
        replacements: dict[tuple[nn.Module, str], nn.Module] = {}
        topk: list[tuple[Any, int]] = []
        for index, (runs, router) in enumerate(zip(configuration.blocks, self.routers, strict=True)):
            if not runs:
                replacements[self.blocks, str(index)] = self.skipped_block(index)
            elif router is not None:
                topk.append((router, configuration.topk[index]))
        try:
            with replace_modules(replacements):
                for router, k in topk:
                    router.top_k = k
                yield
        finally:
            for router, _ in topk:
                router.top_k = trained

    def with_encoding(self, encoding: Any) -> AbstractContextManager[None]:
        """Use an existing encoding of the image within the context instead of running the vision encoder."""
        return replace_modules({self.vision_site: CachedVisionEncoder(self.vision_encoder, encoding)})

    def pooled_language(self, question: str) -> torch.Tensor:
        """Mean over the token embeddings of a question, (width,)."""
        tokens = self.tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"]
        embed = self.model.get_input_embeddings()
        return embed(tokens.to(self.model.device))[0].mean(0)

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer: the EOS tokens of the generation config and the tokenizer."""
        return stop_token_ids(getattr(self.model, "generation_config", None), self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return self.processor.tokenizer

    @torch.no_grad()
    def generate(self, inputs: Inputs, max_new_tokens: int, end_tokens: Sequence[int]) -> list[int]:
        """Decode greedily until the first end token, which is not returned."""
        state = self.prefill(inputs)
        tokens: list[int] = []
        while True:
            token = state.logits.argmax(-1, keepdim=True)
            if int(token) in end_tokens:
                return tokens
            tokens.append(int(token))
            if len(tokens) == max_new_tokens:
                return tokens
            state = self.decode(state, token)
