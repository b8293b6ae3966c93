"""Which tensors a Hugging Face export has, and from which tensors of the sharded model each is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from verl_ext.checkpoint.layout import PLAN
from verl_ext.checkpoint.shards import local_part
from verl_ext.errors import UserError, first_line_of
from verl_ext.metrics.atomic import parse_json

UNMERGEABLE = ("lora_magnitude_vector", "lora_embedding_", ".lora_bias")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that is merged into a weight.

    Attributes:
        down: name of A, (rank, in).
        up: name of B, (out, rank).
        scaling: factor of B A.
        transposed: whether the weight is stored as (in, out).
    """

    down: str
    up: str
    scaling: float
    transposed: bool

    def rows(self, factors: Mapping[str, torch.Tensor], start: int, end: int) -> torch.Tensor:
        """Rows of scale · B A, what the adapter adds to its weight; Hu et al. 2021, arXiv:2106.09685."""
        down, up = factors[self.down].float(), factors[self.up].float()
        product = down[:, start:end].T @ up.T if self.transposed else up[start:end] @ down
        return product * self.scaling


@dataclass(frozen=True)
class Weight:
    """One tensor of the export.

    Attributes:
        name: in the export.
        source: in the sharded model's state.
        adapter: merged into it, if there is one.
    """

    name: str
    source: str
    adapter: Adapter | None = None


def exported_weights(model: PreTrainedModel | PeftModel) -> list[Weight]:
    """The tensors that a model's export holds; one that is tied to another is left to whoever loads it.

    Raises:
        UserError: it has adapters that cannot be merged.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    tied = set(base._tied_weights_keys or ()) if base.config.tie_word_embeddings else set()
    weights = []
    for source in model.state_dict():
        if any(part in source for part in UNMERGEABLE):
            raise UserError(
                f"the adapters hold {source}, which cannot be merged into the export; train plain LoRA adapters, or "
                "set trainer.checkpoint.save_contents=[model,optimizer,extra] to save without an export"
            )
        name, adapter = plain_name(source), adapter_of(source, layers)
        if name in tied and (adapter is not None or ".modules_to_save." in source):
            raise UserError(
                f"{name} is trained by itself but tied to the embeddings, so an export cannot hold both; leave it out "
                "of the adapters, or set trainer.checkpoint.save_contents=[model,optimizer,extra] to save without an "
                "export"
            )
        if name is not None and name not in tied:
            weights.append(Weight(name, source, adapter))
    return weights


def plain_name(source: str) -> str | None:
    """The name a tensor has without peft's wrapping; None for one that the export lacks."""
    if ".lora_" in source or ".original_module." in source:
        return None
    head, trained, tail = source.removeprefix("base_model.model.").partition(".modules_to_save.")
    name = f"{head}.{tail.partition('.')[2]}" if trained else head  # without the adapter's name
    return name.replace(".base_layer.", ".")


def adapter_of(source: str, layers: Mapping[str, LoraLayer]) -> Adapter | None:
    """The active adapter of the layer whose weight this is."""
    owner = source.removesuffix(".base_layer.weight")
    if owner == source or owner not in layers:
        return None
    layer = layers[owner]
    active = layer.active_adapters[0]
    down, up = (f"{owner}.lora_{part}.{active}.weight" for part in "AB")
    return Adapter(down, up, float(layer.scaling[active]), bool(layer.fan_in_fan_out))  # type: ignore[attr-defined]  # of every layer that LoRA has


def plan_to_json(weights: list[Weight]) -> str:
    """The text of `export_plan.json`, with which an export can be made from the shards alone."""
    return json.dumps({"format": 1, "weights": [asdict(weight) for weight in weights]}, indent=1) + "\n"


def read_plan(checkpoint: Path, state: Mapping[str, torch.Tensor]) -> list[Weight]:
    """The export plan of a checkpoint.

    Args:
        checkpoint: a `global_step_N`.
        state: of one rank. A checkpoint that verl itself wrote has no plan: all is exported, tied tensors once.

    Raises:
        UserError: it has adapters and no plan.
    """
    path = checkpoint / PLAN
    if path.is_file():
        try:
            entries = parse_json(path.read_bytes())["weights"]
            return [Weight(e["name"], e["source"], Adapter(**e["adapter"]) if e["adapter"] else None) for e in entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({first_line_of(error)}); restore it, or take another checkpoint"
            ) from error
    if any(".lora_" in name for name in state):
        raise UserError(
            f"{checkpoint} has LoRA adapters and no {PLAN} that says how to merge them; "
            "take a checkpoint that this pipeline wrote"
        )
    places = {name: local_part(tensor).data_ptr() for name, tensor in state.items()}
    first = {place: name for name, place in reversed(places.items())}
    return [Weight(name, name) for name, place in places.items() if first[place] == name]
