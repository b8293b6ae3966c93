"""Writes `huggingface/`: the weights in the type they are served in, loadable by transformers and vLLM."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    dtype: torch.dtype,
    is_writer: bool,
) -> None:
    """Gather a sharded model tensor by tensor and write it as a Hugging Face model; collective.

    Args:
        model: sharded with FSDP2; LoRA adapters are merged into the weights.
        tokenizer: saved beside the weights with its chat template.
        directory: where to write.
        dtype: type of the floating-point weights on the disk.
        is_writer: true on rank 0, which alone keeps the gathered tensors.
    """
    weights = {name: tensor for name, tensor in full_weights(model, dtype, is_writer) if is_writer}
    if not is_writer:
        return
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(base.config)
    config.dtype = dtype
    config.save_pretrained(directory)
    if base.can_generate():
        # to_json_string instead of save_pretrained, which refuses some generation configs that models ship with
        (directory / "generation_config.json").write_text(base.generation_config.to_json_string())
    tokenizer.save_pretrained(directory)
    save_torch_state_dict(weights, directory, metadata={"format": "pt"})
    for path in directory.glob("*.safetensors"):  # safetensors makes them readable for their owner alone
        path.chmod((directory / "config.json").stat().st_mode)


def full_weights(model: torch.nn.Module, dtype: torch.dtype, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of each weight that a Hugging Face model of this architecture has; collective.

    Args:
        model: sharded with FSDP2.
        dtype: what floating-point tensors are cast to.
        keep: whether this rank wants the values; the others take part in the gathering and get empty tensors.
    """
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    state = model.state_dict()
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    tied = set(base._tied_weights_keys or ()) if base.config.tie_word_embeddings else set()
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain_name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        whole = gather(tensor)
        owner = name.removesuffix(".base_layer.weight")
        if owner != name and owner in adapters:
            whole = whole + lora_delta(adapters[owner], state, owner).to(whole.dtype)
        if plain_name not in tied:
            yield plain_name, for_disk(whole, dtype) if keep else torch.empty(0)


def for_disk(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor on the CPU, in `dtype` where it is of floating point."""
    return tensor.detach().to(dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cpu").contiguous()


def lora_delta(layer: LoraLayer, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """scale · B A, what the active adapter adds to its layer's weight (out, in); Hu et al. 2021, arXiv:2106.09685."""
    adapter = layer.active_adapters[0]
    down, up = (gather(state[f"{name}.lora_{part}.{adapter}.weight"]).float() for part in "AB")
    delta = up @ down * layer.scaling[adapter]
    return delta.T if layer.fan_in_fan_out else delta


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
