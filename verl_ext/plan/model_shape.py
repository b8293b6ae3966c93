"""The model of a configuration, and its parameters in FSDP2's groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl_ext.commands import program
from verl_ext.config.compose import load_yaml
from verl_ext.config.schema import value_at
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import (
    caps_scores,
    hub_answers,
    is_hub_name,
    read_json,
    require_capped_scores,
    require_no_remote_code,
)
from verl_ext.plan.activations import ActivationCounter
from verl_ext.plan.workload import SEE_SUPPORTED, PlannedConfig
from verl_ext.trainer.config import ModelConfig
from verl_ext.trainer.device import pick_attention
from verl_ext.trainer.stages import SFTConfig, sft_recipe_of

DIMENSIONS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Keys that a model's configuration must have."""
_QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN2_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of a model's configuration that cap or scale logits."""
BUILT_IN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-Coder-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-Coder-7B": _QWEN2_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_1_5B,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN2_1_5B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "data/smollm2_135m": _SMOLLM2_135M,  # `prepare smollm2` copies it from an installed package
}
"""Dimensions of the models that recipes name, from their `config.json` on the Hub."""


# The model of a configuration


def find_model(config: PlannedConfig) -> tuple[PretrainedConfig, list[str]]:
    """Return the model's own configuration, and notes for the user about its source.

    Reads it from a directory, the Hub's cache or the Hub; without a network, uses the built-in dimensions.

    Raises:
        UserError: no model is named, or its dimensions cannot be read.
    """
    name, notes = named_model(config)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    error: Exception = OSError(name)
    asked_hub = False
    for asks_hub in (False, True):  # the disk and the cache first
        if not asks_hub or (is_hub_name(name) and hub_answers(timeout_s=3)):
            asked_hub = asks_hub
            try:
                return read_model_config(name, config.model.trust_remote_code, local_files_only=not asks_hub), notes
            except UserError:
                raise
            except Exception as failure:  # a damaged file may raise anything
                # the first line of this error names the field only
                cause = failure.__cause__ if isinstance(failure, StrictDataclassError) else None
                error = cause if isinstance(cause, Exception) else failure
    if name in BUILT_IN:
        built_in = f"{name} cannot be read here; using built-in dimensions"
        return AutoConfig.for_model(**BUILT_IN[name]), [*notes, built_in]
    if is_hub_name(name):
        found = "neither on this machine nor on the Hub"
        if not asked_hub:
            found = "not on this machine, and the Hub cannot be reached"
        raise UserError(f"model.partial_pretrain={name} is {found}; specify another model")
    if Path(name).exists():
        raise UserError(f"model.partial_pretrain={name} cannot be read ({first_line_of(error)}); specify another model")
    commands = " and ".join(f"`{program('prepare')} {each}`" for each in config.prepare)
    first = f"run {commands} first" if commands else "create it first"
    raise UserError(f"model.partial_pretrain={name} does not exist; {first}, or specify another model")


def named_model(config: PlannedConfig) -> tuple[str, list[str]]:
    """Return `model.partial_pretrain`, or the initial model of the preceding SFT run, with notes for the user.

    Raises:
        UserError: neither is known.
    """
    if config.model.partial_pretrain is not None:
        return str(config.model.partial_pretrain), []
    run_dir = value_at(config, "model.sft_run")
    recipe = sft_recipe_of(Path(run_dir)) if run_dir else None
    if recipe is None:
        raise UserError(f"model.sft_run={run_dir} is not a run of a recipe known here; set model.partial_pretrain")
    name = load_yaml(recipe)["model"]["partial_pretrain"]
    return str(name), [f"{run_dir} is assumed to be a run of recipe={recipe.stem}"]


def read_model_config(name: str, trust_remote_code: bool, local_files_only: bool) -> PretrainedConfig:
    """Read transformers' configuration from a directory or the Hub."""
    if (local := Path(name) / "config.json").is_file():
        read_json(local)  # if it is not an object, transformers may raise any exception
    require_no_remote_code(name, trust_remote_code, local_files_only)
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=local_files_only)


def settle(config: PlannedConfig, model_config: PretrainedConfig, is_gpu: bool) -> None:
    """Change settings in place, as the trainer does, that this model does not support.

    sdpa cannot cap attention scores; on GPUs, the plan assumes flash-attention. The fused loss cannot cap or scale
    logits.

    Raises:
        UserError: the trainer refuses the attention kernel on this device or for this model.
    """
    if not is_gpu:
        pick_attention(config.model.attn_implementation, "cpu", torch.float32)
    require_capped_scores(config.model.attn_implementation, model_config)
    if config.model.attn_implementation == "auto" and caps_scores(model_config):
        config.model.attn_implementation = "flash_attention_2" if is_gpu else "eager"
    if isinstance(config, SFTConfig) and changes_logits(model_config):
        config.model.fused_loss = False


def changes_logits(model_config: PretrainedConfig) -> bool:
    """Whether a model caps or scales its logits."""
    return any(getattr(model_config, key, None) not in (None, 1) for key in OF_LOGITS)


# Its shape


@dataclass(frozen=True)
class ParameterGroup:
    """Shapes of parameters that FSDP2 gathers together.

    Attributes:
        shapes: all parameters.
        trained_shapes: those whose gradients are reduced; None if all are.
    """

    shapes: tuple[tuple[int, ...], ...]
    trained_shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def trained(self) -> ParameterGroup:
        """The group without its frozen parameters."""
        return self if self.trained_shapes is None else ParameterGroup(self.trained_shapes)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, self.shapes))

    @property
    def last_numel(self) -> int:
        """Elements of the last parameter, whose gradient outlives the others' in a reduce-scatter."""
        return math.prod(self.shapes[-1]) if self.shapes else 0

    def shard_numel(self, num_ranks: int) -> int:
        """Elements that a rank holds: each parameter is sharded along its first dimension, rounded up."""
        return sum(-(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in self.shapes)


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder.

    Attributes:
        model_type: transformers' name of the architecture.
        hidden: width of the hidden states.
        head_dim: width of an attention head.
        vocab: size of the vocabulary.
        caps_logits: whether the logits pass through a tanh, as in Gemma 2.
        has_fused_loss: whether the trainer's fused loss supports the model, which must not cap or scale its logits.
        uses_lora: whether LoRA adapters are trained, and all other weights frozen.
        layer: one decoder layer.
        embedding: the input embedding if it is a separate group; verl wraps it unless the output projection shares it.
        root: everything else, including the output projection.
        activations: counts the tensors that autograd saves.
    """

    model_type: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    caps_logits: bool
    has_fused_loss: bool
    uses_lora: bool
    layer: ParameterGroup
    embedding: ParameterGroup
    root: ParameterGroup
    activations: ActivationCounter = field(repr=False, compare=False)

    @property
    def numel(self) -> int:
        """All parameters, tied ones once."""
        return self.num_layers * self.layer.numel + self.embedding.numel + self.root.numel

    @property
    def trained(self) -> ModelShape:
        """The model without its frozen parameters."""
        layer, embedding, root = (each.trained for each in (self.layer, self.embedding, self.root))
        return replace(self, layer=layer, embedding=embedding, root=root)

    @property
    def matmul_numel(self) -> int:
        """Parameters of matrix products per token: those of the layers and of the output projection."""
        return self.num_layers * self.layer.numel + self.vocab * self.hidden

    @property
    def groups(self) -> list[ParameterGroup]:
        """All groups in the order of a forward pass; the root is gathered first."""
        return [each for each in (self.root, self.embedding) if each.shapes] + [self.layer] * self.num_layers

    def kv_numel(self, num_ranks: int = 1) -> int:
        """Elements of one token's keys and values in all layers on each of the ranks that share the heads."""
        return 2 * self.num_layers * max(1, self.num_kv_heads // num_ranks) * self.head_dim

    def splits_heads(self, num_ranks: int) -> bool:
        """Whether vLLM can divide the attention heads over the ranks; it repeats key-value heads if there are fewer."""
        divides_kv = self.num_kv_heads % num_ranks == 0 or num_ranks % self.num_kv_heads == 0
        return self.num_heads % num_ranks == 0 and divides_kv

    def shard_numel(self, num_ranks: int) -> int:
        """Elements of all parameters that a rank holds."""
        return sum(group.shard_numel(num_ranks) for group in self.groups)


def empty_model(config: PretrainedConfig, settings: ModelConfig | None = None) -> PreTrainedModel | PeftModel:
    """Build a model without memory for its parameters.

    Args:
        settings: determines the LoRA adapters; None adds none.

    Raises:
        UserError: transformers cannot build the model, or peft cannot add the adapters.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # architectures fail in different ways
        raise UserError(
            f"transformers cannot build a causal language model of {config.model_type} ({first_line_of(error)}); "
            "specify another model"
        ) from error
    if settings is None or not settings.uses_lora:
        return model
    from verl_ext.trainer.model import add_lora  # here, because it takes seconds to import

    with torch.device("meta"):
        return add_lora(model, settings)


def shape_of(config: PretrainedConfig, model: PreTrainedModel | PeftModel | None = None) -> ModelShape:
    """Return the dimensions of a model, and the parameters of its real architecture.

    Args:
        model: the `empty_model` of this configuration; None builds it without LoRA.

    Raises:
        UserError: transformers cannot build the model, or it is not a dense decoder like Llama, or it has other
            adapters than LoRA on linear layers of the decoder layers.
    """
    model = empty_model(config) if model is None else model
    # modules that verl's `apply_fsdp2` wraps
    layers = [each for each in model.modules() if type(each).__name__ in (model._no_split_modules or ())]
    is_equal = len({group_of(each) for each in layers}) == 1
    if isinstance(model, PeftModel) and not is_equal and shape_of(config):  # without adapters, all layers are equal
        raise UserError(f"the planner does not support LoRA adapters that differ between layers; {SEE_SUPPORTED}")
    if not is_equal or any("expert" in name for name, _ in layers[0].named_modules()):
        raise UserError(
            f"the planner does not support {config.model_type}, only dense decoders with equal layers; {SEE_SUPPORTED}"
        )
    missing = [name for name in DIMENSIONS if not hasattr(config, name)]
    if missing or not hasattr(layers[0], "self_attn"):
        raise UserError(
            f"the planner does not support {config.model_type}, only decoders like Llama, whose configuration has "
            f"{', '.join(DIMENSIONS)}; {SEE_SUPPORTED}"
        )
    if isinstance(model, PeftModel):
        require_plain_adapters(model, layers)
    tied = config.tie_word_embeddings
    return ModelShape(
        model_type=config.model_type,
        num_layers=len(layers),
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        caps_logits=getattr(config, "final_logit_softcapping", None) is not None,
        has_fused_loss=not changes_logits(config),
        uses_lora=isinstance(model, PeftModel),
        layer=group_of(layers[0]),
        embedding=ParameterGroup(()) if tied else group_of(model.get_input_embeddings()),
        root=group_of(model, without=layers if tied else [*layers, model.get_input_embeddings()]),
        activations=ActivationCounter(model, layers),
    )


def require_plain_adapters(model: PeftModel, layers: list[torch.nn.Module]) -> None:
    """Accept LoRA adapters on linear layers of decoder layers.

    Raises:
        UserError: the plan has no formulas for the adapters.
    """
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    in_layers = sum(each.requires_grad for layer in layers for each in layer.parameters())
    is_plain = in_layers == len(trained) and all(re.search(r"\.lora_[AB]\.\w+\.weight$", name) for name in trained)
    if not is_plain or any(
        getattr(each, name, None)
        for each in model.peft_config.values()
        for name in ("lora_dropout", "target_parameters")
    ):
        raise UserError(
            "the planner supports only plain LoRA adapters on linear layers of decoder layers, without dropout, biases "
            f"or other trained parameters; {SEE_SUPPORTED}"
        )


def group_of(module: torch.nn.Module, without: Iterable[torch.nn.Module] = ()) -> ParameterGroup:
    """Return the parameters of a module as one group, except those of other modules."""
    taken = {id(each) for other in without for each in other.parameters()}
    parameters = [each for each in module.parameters() if id(each) not in taken]
    trained = tuple(tuple(each.shape) for each in parameters if each.requires_grad)
    return ParameterGroup(tuple(tuple(each.shape) for each in parameters), trained)
