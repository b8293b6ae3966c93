"""The tensors of a Hugging Face export, and how each is computed from the tensors of the sharded model.

Weight sync to rollout engines sends the same tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl_ext.checkpoint.manifest import PLAN
from verl_ext.distributed import to_local
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json

UNMERGEABLE = re.compile(r"lora_magnitude_vector|lora_embedding_|\.lora_B\..*\.bias$")
"""Finds the names of tensors of DoRA, of adapters of embeddings, and of `lora_bias=True`."""


@dataclass(frozen=True)
class LoraMerge:
    """A LoRA adapter to merge into a weight.

    Attributes:
        down: name of matrix A, (rank, in).
        up: name of matrix B, (out, rank).
        scaling: factor of B A.
        transposed: whether the weight is stored as (in, out).
        num_experts: number of experts for a weight (num_experts, out, in), with A and B stacked as in peft's
            `ParamWrapper`; None for a single matrix.
    """

    down: str
    up: str
    scaling: float
    transposed: bool
    num_experts: int | None = None

    def delta(self, factors: Mapping[str, torch.Tensor], start: int, end: int) -> torch.Tensor:
        """Rows `start` to `end` (exclusive) of scaling · B A; Hu et al. 2021, arXiv:2106.09685."""
        down, up = factors[self.down].float(), factors[self.up].float()
        if self.num_experts is not None:
            down = down.unflatten(0, (self.num_experts, -1))[start:end]  # (rows, rank, in)
            up = up.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)[start:end]  # (rows, out, rank)
            product = up @ down
            return (product.mT if self.transposed else product) * self.scaling
        product = down[:, start:end].T @ up.T if self.transposed else up[start:end] @ down
        return product * self.scaling


@dataclass(frozen=True)
class TensorSlice:
    """The part of a model's tensor that is exported as its own tensor, such as one expert's weight.

    Attributes:
        row: first row of the model's tensor that contains the slice.
        num_rows: number of rows of the slice, each within one row of the model's tensor; None if the whole slice is
            within one row.
        shape: shape within one row.
        stride: stride within one row, in elements.
        offset: offset within one row, in elements.
    """

    row: int
    num_rows: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(view: torch.Tensor, tensor: torch.Tensor) -> TensorSlice | None:
        """The slice for a view of a contiguous tensor; None if a row of the view spans several rows of the tensor."""
        row, offset = divmod(int(view.storage_offset()), tensor.stride(0))
        shape, stride = tuple(view.shape), tuple(view.stride())
        if stride[:1] == tensor.stride()[:1]:
            found = TensorSlice(row, shape[0], shape[1:], stride[1:], offset)
        else:
            found = TensorSlice(row, None, shape, stride, offset)
        return found if found.fits(tensor.shape) else None

    @property
    def end(self) -> int:
        """The row after the last row that contains the slice."""
        return self.row + (1 if self.num_rows is None else self.num_rows)

    def fits(self, shape: torch.Size) -> bool:
        """Whether the slice is inside a tensor of this shape."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        is_inside = len(shape) > 0 and self.end <= shape[0] and last < shape[1:].numel()
        return is_inside and min(self.row, self.offset, *self.shape, *self.stride) >= 0

    def of_rows(self, rows: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
        """Extract the slice's part of some rows of the model's tensor.

        Args:
            rows: rows of the model's tensor.
            start: index of the first of these rows.

        Returns:
            Index of the first extracted row in the exported tensor, and the rows, possibly none.
        """
        first, last = max(self.row, start), min(self.end, start + len(rows))
        chosen = rows[first - start : max(first, last) - start].contiguous()
        strides, offset = (chosen.stride(0), *self.stride), chosen.storage_offset() + self.offset
        part = chosen.as_strided((len(chosen), *self.shape), strides, offset)
        if self.num_rows is not None:
            return first - self.row, part
        return 0, part.flatten(0, 1) if self.shape else part


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of the export. `export_plan.json` uses the attribute names as keys.

    Attributes:
        name: name in the export.
        source: name of the tensor in the sharded model's state.
        adapter: adapter to merge into the tensor, if any.
        part: slice of the source; None for the whole source.
    """

    name: str
    source: str
    adapter: LoraMerge | None = None
    part: TensorSlice | None = None

    def shape(self, source: torch.Size) -> tuple[int, ...]:
        """Shape in the export, given the shape of the source."""
        if self.part is None:
            return tuple(source)
        return self.part.shape if self.part.num_rows is None else (self.part.num_rows, *self.part.shape)

    def of_rows(self, rows: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
        """Extract the tensor's part of some rows of its source, with its index, as `TensorSlice.of_rows` does."""
        return (start, rows) if self.part is None else self.part.of_rows(rows, start)


def merge_rows(
    adapter: LoraMerge | None, rows: torch.Tensor, factors: Mapping[str, torch.Tensor], start: int, end: int
) -> torch.Tensor:
    """Add the adapter to rows `start` to `end` (exclusive) of its weight; `factors` holds its full A and B."""
    return rows if adapter is None else rows + adapter.delta(factors, start, end).to(rows)


# The tensors of a model


def exported_tensors(model: PreTrainedModel | PeftModel) -> list[ExportedTensor]:
    """The tensors to export, the same as those of `save_pretrained`; the loader restores tied tensors.

    Call this on rank 0, which loaded the model from files and knows the tensor names in them; see `_file_tensors`.

    Raises:
        UserError: the model has adapters that cannot be merged.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    base = unwrap_peft(model)
    tied, state = set(base.all_tied_weights_keys), model.state_dict()
    tensors = {}
    for source in state:
        if UNMERGEABLE.search(source):
            raise UserError(
                f"the adapters hold {source}, which cannot be merged into the export; train plain LoRA adapters, or "
                "set trainer.checkpoint.save_contents=[model,optimizer,extra] to save without an export"
            )
        name, adapter = plain_name(source), _adapter_of(source, layers)
        if name in tied and (adapter is not None or ".modules_to_save." in source):
            raise UserError(
                f"{name} is trained separately but tied to the embeddings, so an export cannot hold both; remove it "
                "from the adapters, or set trainer.checkpoint.save_contents=[model,optimizer,extra] to save without an "
                "export"
            )
        if name is not None and name not in tied:
            tensors[name] = ExportedTensor(name, source, adapter)
    parts = _file_tensors(base, {name: state[tensor.source] for name, tensor in tensors.items()})
    return [
        ExportedTensor(name, tensor.source, tensor.adapter, part)
        for tensor in tensors.values()
        for name, part in parts[tensor.name].items()
    ]


def unwrap_peft(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model without peft's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _file_tensors(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, TensorSlice | None]]:
    """Find how transformers splits a model's tensors into the tensors in its files.

    Since transformers 5, a model's tensors can differ from those in its files: in memory, one tensor holds the weights
    of all experts of a layer. `save_pretrained` applies `revert_weight_conversion`; this applies it to meta tensors.

    Args:
        model: model without adapters. If it was loaded from files, it knows how they were converted; otherwise the
            default conversion applies.
        state: the model's tensors; only their shapes are used.

    Returns:
        For each tensor of the model, the names in the files with their slices; None stands for the whole tensor. A
        tensor that cannot be split into slices stays whole under its own name, which transformers can load too.
    """
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    names = {id(tensor): name for name, tensor in empty.items()}
    with _NoCopies():
        reverted = revert_weight_conversion(model, dict(empty))
    found: dict[str, dict[str, TensorSlice | None]] = {name: {} for name in empty}
    for name, tensor in reverted.items():
        if id(tensor) in names:
            found[names[id(tensor)]][name] = None
        elif (source := names.get(id(tensor._base))) is not None and source in found:
            part = TensorSlice.of(tensor, empty[source])
            if part is None:
                del found[source]
            else:
                found[source][name] = part
    return {name: found.get(name) or {name: None} for name in empty}


class _NoCopies(TorchFunctionMode):
    """Makes `contiguous` return the view itself, so that a slice's position in its tensor stays known."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def plain_name(source: str) -> str | None:
    """The name of a tensor without peft's prefixes; None if the tensor is not exported."""
    if ".lora_" in source or ".original_module." in source:
        return None
    head, trained, tail = source.removeprefix("base_model.model.").partition(".modules_to_save.")
    name = f"{head}.{tail.partition('.')[2]}" if trained else head  # without the adapter's name
    return re.sub(r"(\.base_layer)+\.", ".", name)  # nested once per adapter of a module


def adapters_of(layers: Mapping[str, Any], sources: Iterable[str]) -> dict[str, LoraMerge]:
    """The active adapters by the names of the weights that they change, given peft's layers by name."""
    found = {source: _adapter_of(source, layers) for source in sources}
    return {source: adapter for source, adapter in found.items() if adapter is not None}


def _adapter_of(source: str, layers: Mapping[str, Any]) -> LoraMerge | None:
    """The active adapter of a weight, given peft's layers by name."""
    # peft wraps a layer of experts once for each of its parameters, from the inside out
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
        is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # only some expert layers have it
        return LoraMerge(down, up, scaling, is_transposed, layer.num_experts)
    return LoraMerge(down, up, scaling, bool(layer.fan_in_fan_out))


# The export plan


def plan_to_json(tensors: list[ExportedTensor]) -> str:
    """The text of `export_plan.json`, which allows an export from the shards alone."""
    return json.dumps({"format": 2, "weights": [asdict(tensor) for tensor in tensors]}, indent=1) + "\n"


def read_plan(checkpoint: Path, state: Mapping[str, torch.Tensor]) -> list[ExportedTensor]:
    """Read the export plan of a checkpoint, given the model state of one rank.

    A checkpoint that verl wrote has no plan; all its tensors are exported, tied tensors once.

    Raises:
        UserError: the plan cannot be read, or the checkpoint has adapters but no plan.
    """
    path = checkpoint / PLAN
    if path.is_file():
        try:
            return [_planned(entry, state) for entry in parse_json(path.read_bytes())["weights"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read ({first_line_of(error)}); restore it, or use another checkpoint"
            ) from error
    if any(".lora_" in name for name in state):
        raise UserError(
            f"{checkpoint} has LoRA adapters but no {PLAN}, which describes how to merge them; "
            "use a checkpoint that this pipeline wrote"
        )
    pointers = {name: to_local(tensor).data_ptr() for name, tensor in state.items()}
    first_name = {pointer: name for name, pointer in reversed(pointers.items())}
    return [ExportedTensor(name, name) for name, pointer in pointers.items() if first_name[pointer] == name]


def _planned(entry: dict[str, Any], state: Mapping[str, torch.Tensor]) -> ExportedTensor:
    """Parse an entry of a plan; format 1 has no slices."""
    adapter, part = (entry.get(name) for name in ("adapter", "part"))
    if part is not None:
        part = TensorSlice(part["row"], part["num_rows"], tuple(part["shape"]), tuple(part["stride"]), part["offset"])
        if not part.fits(state[entry["source"]].shape):
            raise ValueError(f"{entry['name']} is not inside {entry['source']}")
    return ExportedTensor(entry["name"], entry["source"], LoraMerge(**adapter) if adapter else None, part)
