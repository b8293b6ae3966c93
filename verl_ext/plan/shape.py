"""What of a model decides memory and time: its dimensions, and its parameters as FSDP2 groups them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl_ext.errors import UserError, first_line_of

DIMENSIONS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""What the configuration of a model must tell."""


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        shapes: of each parameter.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(map(math.prod, self.shapes))

    @property
    def last_numel(self) -> int:
        """Elements of the last one, whose gradient outlives the others' in a reduce-scatter."""
        return math.prod(self.shapes[-1]) if self.shapes else 0

    def shard_numel(self, num_ranks: int) -> int:
        """Elements that a rank holds: each parameter is cut along its first dimension, rounded up."""
        return sum(-(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in self.shapes)


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder.

    Attributes:
        model_type: transformers' name of the architecture.
        num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab: dimensions.
        has_qk_norm: whether queries and keys are normalised by head (Qwen3).
        layer: one decoder layer.
        embedding: the input embedding, where it is a group of its own: verl wraps it unless the output shares it.
        root: everything else, the output projection in it.
    """

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    has_qk_norm: bool
    layer: Group
    embedding: Group
    root: Group

    @property
    def numel(self) -> int:
        """All parameters, tied ones once."""
        return self.num_layers * self.layer.numel + self.embedding.numel + self.root.numel

    @property
    def matmul_numel(self) -> int:
        """Parameters that every token is multiplied by: the layers' and the output projection's."""
        return self.num_layers * self.layer.numel + self.vocab * self.hidden

    @property
    def groups(self) -> list[Group]:
        """All groups in the order of a forward pass: the root is gathered first."""
        return [each for each in (self.root, self.embedding) if each.shapes] + [self.layer] * self.num_layers

    def shard_numel(self, num_ranks: int) -> int:
        """Elements of all parameters that a rank holds."""
        return sum(group.shard_numel(num_ranks) for group in self.groups)

    @property
    def kv_numel(self) -> int:
        """Elements of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Read the dimensions, and count the parameters of the real architecture, made without memory.

    Raises:
        UserError: no dense decoder, or none that transformers can build.
    """
    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # without memory, shared parameters have come apart
    except Exception as error:  # an architecture fails in its own way
        raise UserError(
            f"no causal language model can be made of {config.model_type} ({first_line_of(error)}); name another model"
        ) from error
    layers = wrapped_layers(model)
    if any("expert" in name for name, _ in layers[0].named_modules()) or len({group_of(each) for each in layers}) != 1:
        raise UserError(f"the plan knows dense decoders with equal layers, not {config.model_type}; there is no plan")
    tied = config.tie_word_embeddings
    embedding = Group(()) if tied else group_of(model.get_input_embeddings())
    missing = [name for name in DIMENSIONS if not hasattr(config, name)]
    if missing or not hasattr(layers[0], "self_attn"):
        raise UserError(
            f"the plan knows decoders of Llama's kind, whose configuration tells {', '.join(DIMENSIONS)}, not "
            f"{config.model_type}; there is no plan"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        config.model_type, len(layers), config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, head_dim, config.vocab_size, hasattr(layers[0].self_attn, "q_norm"),
        group_of(layers[0]), embedding, rest_of(model, layers, tied),
    )  # fmt: skip


def wrapped_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that verl's `apply_fsdp2` makes groups of by their class."""
    return [each for each in model.modules() if type(each).__name__ in (model._no_split_modules or ())]


def group_of(module: torch.nn.Module) -> Group:
    """All parameters of a module as one group."""
    return Group(tuple(tuple(each.shape) for each in module.parameters()))


def rest_of(model: PreTrainedModel, layers: list[torch.nn.Module], tied: bool) -> Group:
    """What is left for the root, in the model's order."""
    taken = {id(each) for layer in layers for each in layer.parameters()}
    if not tied:
        taken |= {id(each) for each in model.get_input_embeddings().parameters()}
    return Group(tuple(tuple(each.shape) for each in model.parameters() if id(each) not in taken))
