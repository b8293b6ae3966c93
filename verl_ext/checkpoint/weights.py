"""Which tensors a Hugging Face export has, and from which tensors of the sharded model each is made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl_ext.checkpoint.layout import PLAN
from verl_ext.checkpoint.shards import local_part
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json

UNMERGEABLE = ("lora_magnitude_vector", "lora_embedding_", ".lora_bias")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that is merged into a weight.

    Attributes:
        down: name of A, (rank, in).
        up: name of B, (out, rank).
        scaling: factor of B A.
        transposed: whether the weight is stored as (in, out).
        num_experts: the weight is that of so many experts, (num_experts, out, in), and their factors are stacked as
            peft's `ParamWrapper` stacks them; None for a single matrix.
    """

    down: str
    up: str
    scaling: float
    transposed: bool
    num_experts: int | None = None

    def rows(self, factors: Mapping[str, torch.Tensor], start: int, end: int) -> torch.Tensor:
        """Rows of scale · B A, what the adapter adds to its weight; Hu et al. 2021, arXiv:2106.09685."""
        down, up = factors[self.down].float(), factors[self.up].float()
        if self.num_experts is not None:
            down = down.unflatten(0, (self.num_experts, -1))[start:end]  # (rows, rank, in)
            up = up.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)[start:end]  # (rows, out, rank)
            product = up @ down
            return (product.mT if self.transposed else product) * self.scaling
        product = down[:, start:end].T @ up.T if self.transposed else up[start:end] @ down
        return product * self.scaling


@dataclass(frozen=True)
class Part:
    """Where a tensor of the export is in a tensor of the model: one expert's weight in that of all experts.

    Attributes:
        row: of the model's tensor, the first that it is in.
        num_rows: it has so many rows, each in one row of the model's tensor; None: it is in that one row.
        shape: in one row.
        stride: in one row, elements.
        offset: in one row, elements.
    """

    row: int
    num_rows: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(view: torch.Tensor, tensor: torch.Tensor) -> Part | None:
        """Of a view of a contiguous tensor; None where a row of the view is in several rows of the tensor."""
        row, offset = divmod(int(view.storage_offset()), tensor.stride(0))
        shape, stride = tuple(view.shape), tuple(view.stride())
        has_rows = stride[:1] == tensor.stride()[:1]
        part = (
            Part(row, shape[0], shape[1:], stride[1:], offset) if has_rows else Part(row, None, shape, stride, offset)
        )
        return part if part.fits(tensor.shape) else None

    def fits(self, shape: torch.Size) -> bool:
        """Whether it is inside of rows of a tensor of this shape."""
        last_row = self.row + (1 if self.num_rows is None else self.num_rows) - 1
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        is_inside = len(shape) > 0 and last_row < shape[0] and last < shape[1:].numel()
        return is_inside and min(self.row, self.offset, *self.shape, *self.stride) >= 0

    def of_rows(self, rows: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
        """What some rows of the model's tensor hold of it.

        Args:
            rows: of the model's tensor.
            start: number of the first of them.

        Returns:
            Number of the first row of the export's tensor, and rows of it, maybe none.
        """
        end = self.row + (1 if self.num_rows is None else self.num_rows)
        first, last = max(self.row, start), min(end, start + len(rows))
        chosen = rows[first - start : max(first, last) - start].contiguous()
        strides, offset = (chosen.stride(0), *self.stride), chosen.storage_offset() + self.offset
        part = chosen.as_strided((len(chosen), *self.shape), strides, offset)
        if self.num_rows is not None:
            return first - self.row, part
        return 0, part.flatten(0, 1) if self.shape else part


@dataclass(frozen=True)
class Weight:
    """One tensor of the export.

    Attributes:
        name: in the export.
        source: in the sharded model's state.
        adapter: merged into it, if there is one.
        part: of the source, if it is not all of it.
    """

    name: str
    source: str
    adapter: Adapter | None = None
    part: Part | None = None

    def shape(self, source: torch.Size) -> tuple[int, ...]:
        """Of the tensor in the export, by that of its source."""
        if self.part is None:
            return tuple(source)
        return self.part.shape if self.part.num_rows is None else (self.part.num_rows, *self.part.shape)

    def of_rows(self, rows: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
        """See `Part.of_rows`."""
        return (start, rows) if self.part is None else self.part.of_rows(rows, start)


def exported_weights(model: PreTrainedModel | PeftModel) -> list[Weight]:
    """The tensors that a model's export holds, those of `save_pretrained`; a tied one is left to whoever loads it.

    To be asked of rank 0: it loaded the model from files, and knows the names in them, see `converted`.

    Raises:
        UserError: it has adapters that cannot be merged.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    tied, state = set(base.all_tied_weights_keys), model.state_dict()
    weights = {}
    for source in state:
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
            weights[name] = Weight(name, source, adapter)
    found = converted(base, {name: state[weight.source] for name, weight in weights.items()})
    return [
        Weight(name, weight.source, weight.adapter, part)
        for weight in weights.values()
        for name, part in found[weight.name].items()
    ]


def converted(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Part | None]]:
    """Into which tensors of its files transformers takes a model's tensors apart.

    Since transformers 5 a model may hold tensors otherwise than its files do: the weights of all experts of a layer as
    one. `revert_weight_conversion` is what `save_pretrained` applies; here it is applied to tensors without memory.

    Args:
        model: without adapters. One that came from files knows how they were converted; others follow the default.
        state: its tensors; only their shapes are looked at.

    Returns:
        By the model's name the names in its files, each with the part of the tensor that it has, None for all of it. A
        tensor that cannot be had by cutting keeps its name and is whole; transformers loads that as well.
    """
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    names = {id(tensor): name for name, tensor in empty.items()}
    with _NoCopies():
        reverted = revert_weight_conversion(model, dict(empty))
    found: dict[str, dict[str, Part | None]] = {name: {} for name in empty}
    for name, tensor in reverted.items():
        if id(tensor) in names:
            found[names[id(tensor)]][name] = None
        elif (source := names.get(id(tensor._base))) is not None and source in found:
            part = Part.of(tensor, empty[source])
            if part is None:
                del found[source]
            else:
                found[source][name] = part
    return {name: found.get(name) or {name: None} for name in empty}


class _NoCopies(TorchFunctionMode):
    """Within it a part of a tensor that is made contiguous stays a view, which tells where in the tensor it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def plain_name(source: str) -> str | None:
    """The name a tensor has without peft's wrapping; None for one that the export lacks."""
    if ".lora_" in source or ".original_module." in source:
        return None
    head, trained, tail = source.removeprefix("base_model.model.").partition(".modules_to_save.")
    name = f"{head}.{tail.partition('.')[2]}" if trained else head  # without the adapter's name
    return re.sub(r"(\.base_layer)+\.", ".", name)  # one for each adapter of a module that has several


def adapter_of(source: str, layers: Mapping[str, Any]) -> Adapter | None:
    """The active adapter of a weight.

    Args:
        source: name of the weight.
        layers: peft's layers by name. A layer of experts is wrapped once for each of its parameters, from the inside.
    """
    owner, _, parameter = source.rpartition(".")
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
        layer = layers.get(owner)
        adapted = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        if layer is not None and adapted == parameter:
            break
    else:
        return None
    active = layer.active_adapters[0]
    down, up = (f"{owner}.lora_{part}.{active}.weight" for part in "AB")
    scaling = float(layer.scaling[active])
    if isinstance(layer, ParamWrapper) and layer.get_param().dim() == 3:
        is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # few experts of transformers say
        return Adapter(down, up, scaling, is_transposed, layer.num_experts)
    return Adapter(down, up, scaling, bool(layer.fan_in_fan_out))


def plan_to_json(weights: list[Weight]) -> str:
    """The text of `export_plan.json`, with which an export can be made from the shards alone."""
    return json.dumps({"format": 2, "weights": [asdict(weight) for weight in weights]}, indent=1) + "\n"


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
            return [_planned(entry, state) for entry in parse_json(path.read_bytes())["weights"]]
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


def _planned(entry: dict[str, Any], state: Mapping[str, torch.Tensor]) -> Weight:
    """An entry of a plan; format 1 knows no parts."""
    adapter, part = (entry.get(name) for name in ("adapter", "part"))
    if part is not None:
        part = Part(part["row"], part["num_rows"], tuple(part["shape"]), tuple(part["stride"]), part["offset"])
        if not part.fits(state[entry["source"]].shape):
            raise ValueError(f"{entry['name']} is not inside of {entry['source']}")
    return Weight(entry["name"], entry["source"], Adapter(**adapter) if adapter else None, part)
