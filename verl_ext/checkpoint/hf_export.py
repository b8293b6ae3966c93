"""`huggingface/` in a checkpoint: every rank writes its own rows directly into the safetensors files.

A file consists of the header's length in 8 bytes, a JSON header, and the bytes of the tensors
(https://github.com/huggingface/safetensors#format). The library's own writer needs all tensors of a file in memory.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from verl_ext.checkpoint.config import ExportConfig
from verl_ext.checkpoint.hf_tensors import ExportedTensor, exported_tensors, merge_rows, plan_to_json, unwrap_peft
from verl_ext.checkpoint.manifest import ADAPTER, EXPORT, INDEX, PLAN
from verl_ext.distributed import is_sharded, local_rows, on_every_rank, on_rank_zero, to_full, to_local
from verl_ext.errors import UserError
from verl_ext.files import GIB, temporary_directory, temporary_errors, write_errors
from verl_ext.model_files import save_config, save_tokenizer

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


# The layout of the files


class SafetensorsLayout:
    """The files of an export and the position of each tensor in them.

    Attributes:
        tensors: meta tensors with the shape and dtype to store, by name.
        headers: the bytes before the tensors, by file name.
        sizes: size in bytes, by file name.
        offsets: file name and offset in that file in bytes, by tensor name.
        index: content of INDEX; None for a single file.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], max_shard_bytes: int) -> None:
        """Assign the tensors to files.

        Args:
            tensors: tensors on the meta device, by name.
            max_shard_bytes: maximum size of the tensors in a file; a larger tensor gets its own file.
        """
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_bytes,
        )
        self.tensors = tensors
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.offsets: dict[str, tuple[str, int]] = {}
        for file, names in split.filename_to_tensors.items():
            self._place(file, names)
        self.index: bytes | None = None
        if split.is_sharded:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(split.tensor_to_filename)}
            self.index = json.dumps(index, indent=2).encode()

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(self.sizes.values())

    def _place(self, file: str, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        starts, position = {}, 0
        for name in sorted(names, key=lambda name: -self.tensors[name].itemsize):  # keeps every tensor aligned
            tensor, starts[name] = self.tensors[name], position
            position += tensor.nbytes
            offsets = [starts[name], position]
            header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.headers[file] = len(text).to_bytes(8, "little") + text
        self.sizes[file] = len(self.headers[file]) + position
        self.offsets |= {name: (file, len(self.headers[file]) + start) for name, start in starts.items()}


def layout_of(
    tensors: list[ExportedTensor], state: Mapping[str, torch.Tensor], dtype: torch.dtype, max_shard_gib: float
) -> SafetensorsLayout:
    """Compute the layout of an export.

    Args:
        state: the model's tensors by source name; only their full shapes and dtypes are used.
        dtype: dtype in which floating-point tensors are stored.
        max_shard_gib: maximum size of a file, in GiB.
    """
    empty = {}
    for tensor in tensors:
        source = state[tensor.source]
        stored = dtype if source.dtype.is_floating_point else source.dtype
        empty[tensor.name] = torch.empty(tensor.shape(source.shape), dtype=stored, device="meta")
    return SafetensorsLayout(empty, int(max_shard_gib * GIB))


# Writing


def create_files(directory: Path, layout: SafetensorsLayout) -> None:
    """Create the files of an export with their headers and at their full size.

    One process calls this before any process writes rows. If several nodes extended a file while writing, a node on a
    network file system could overwrite another node's data with zeros from a stale cached page.
    """
    for name, header in layout.headers.items():
        with write_errors(directory / name), open(directory / name, "wb") as file:
            file.write(header)
            file.truncate(layout.sizes[name])


class ExportWriter:
    """Writes rows of tensors into the files of an export; several processes can write at the same time.

    Leaving the context flushes the files to disk.

    Args:
        directory: directory with the files that `create_files` created.
    """

    def __init__(self, directory: Path, layout: SafetensorsLayout) -> None:
        self.directory, self.layout = directory, layout
        self._files: dict[str, int] = {}

    def __enter__(self) -> ExportWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            for name, file in self._files.items() if error is None else ():
                with write_errors(self.directory / name):
                    os.fsync(file)
        finally:
            for file in self._files.values():
                os.close(file)

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write consecutive rows of a tensor.

        Args:
            start: index of the first row.
            rows: (rows, ...), on any device and of any floating-point dtype.
        """
        tensor, (file, offset) = self.layout.tensors[name], self.layout.offsets[name]
        values = rows.detach().to(dtype=tensor.dtype).cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().data
        path, position = self.directory / file, offset + start * tensor.shape[1:].numel() * tensor.itemsize
        with write_errors(path):
            if file not in self._files:
                self._files[file] = os.open(path, os.O_WRONLY)
            while data:
                written = os.pwrite(self._files[file], data, position)
                data, position = data[written:], position + written


@dataclass
class ExportedWeights:
    """The weights of one export.

    Attributes:
        tensors: tensors to export.
        layout: layout of the files.
        factors: full matrices A and B of every LoRA adapter, by name.
    """

    tensors: list[ExportedTensor]
    layout: SafetensorsLayout
    factors: Mapping[str, torch.Tensor]

    def write_local_rows(self, directory: Path, state: Mapping[str, torch.Tensor], rank: int) -> None:
        """Write this rank's rows of a sharded model; together, the ranks write the whole export.

        Args:
            directory: directory with the files that `create_files` created.
            rank: this rank; rank 0 also writes the tensors that are not sharded.
        """
        with ExportWriter(directory, self.layout) as writer:
            for source, of_source in groupby(self.tensors, key=lambda tensor: tensor.source):
                value, tensors = state[source], list(of_source)
                start, end = local_rows(value)
                if start < end and (rank == 0 or is_sharded(value)):
                    rows = merge_rows(tensors[0].adapter, to_local(value), self.factors, start, end)
                    for tensor in tensors:
                        writer.write_rows(tensor.name, *tensor.of_rows(rows, start))


# The export of a run


class HuggingFaceExport:
    """Prepares the `huggingface/` directories of a run's checkpoints; all ranks construct it together."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ExportConfig,
        *,
        dtype: torch.dtype,
        last_step: int,
        with_weights: bool,
        is_main: bool,
    ) -> None:
        """Find the tensors to export; collective.

        Args:
            last_step: last step of the run, which is always exported.
            is_main: true on rank 0, which writes the small files.

        Raises:
            UserError: weights are to be exported, but the model has adapters that cannot be merged.
        """
        self.config, self.dtype, self.last_step, self.with_weights = config, dtype, last_step, with_weights
        self.tensors = on_rank_zero(lambda: self._exportable(model))
        self._small_files: dict[str, bytes] = on_every_rank(
            lambda: config_and_tokenizer_files(model, tokenizer, dtype) if is_main else {}
        )

    def _exportable(self, model: PreTrainedModel | PeftModel) -> list[ExportedTensor]:
        """The tensors to export; needed even if this run exports nothing, because `export_plan.json` lists them."""
        try:
            return exported_tensors(model)
        except UserError:
            if self.with_weights:
                raise
            return []

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of a step has an export."""
        is_step = self.config.every is None or step % self.config.every == 0 or step == self.last_step
        return self.with_weights and is_step

    def at(self, step: int, state: Mapping[str, torch.Tensor]) -> ExportedWeights | None:
        """The weights to export at a step, or None; collective, because it gathers the LoRA factors."""
        if not self.is_due(step):
            return None
        adapters = [tensor.adapter for tensor in self.tensors if tensor.adapter is not None]
        names = {name for adapter in adapters for name in (adapter.down, adapter.up)}
        factors = {name: to_full(state[name]).cpu().clone() for name in sorted(names)}
        layout = layout_of(self.tensors, state, self.dtype, self.config.max_shard_gib)
        return ExportedWeights(self.tensors, layout, factors)

    def small_files(self, weights: ExportedWeights | None) -> dict[str, bytes]:
        """Content of all files except the weights, by path relative to the checkpoint."""
        files = dict(self._small_files)
        if self.tensors:
            files[PLAN] = plan_to_json(self.tensors).encode()
        if weights is not None and weights.layout.index is not None:
            files[f"{EXPORT}/{INDEX}"] = weights.layout.index
        return files


def adapter_files(
    model: PreTrainedModel | PeftModel, state: Mapping[str, torch.Tensor], is_main: bool
) -> dict[str, bytes]:
    """LoRA adapters in peft's format, for `PeftModel.from_pretrained` and `model.lora_adapter_path`; collective.

    Args:
        state: the state of the sharded model.
        is_main: whether this is rank 0.

    Returns:
        Content of the files by path relative to the checkpoint; empty without adapters, and except on rank 0.
    """
    if not isinstance(model, PeftModel):
        return {}
    tensors = {}
    for name, tensor in state.items():
        if "lora_" in name or ".modules_to_save." in name:
            full = to_full(tensor)
            if is_main:
                # safetensors refuses tensors that share memory
                tensors[name] = full.cpu().clone(memory_format=torch.contiguous_format)
    if not is_main:
        return {}
    adapter = model.active_adapters[0]
    own = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    settings = {**model.peft_config[adapter].to_dict(), "inference_mode": True}
    lists = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    return {
        f"{ADAPTER}/adapter_model.safetensors": save(own, metadata={"format": "pt"}),
        f"{ADAPTER}/adapter_config.json": (json.dumps(lists, indent=2, sort_keys=True) + "\n").encode(),
    }


def config_and_tokenizer_files(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> dict[str, bytes]:
    """Configuration, generation settings, tokenizer and custom code of a model, by path relative to the checkpoint."""
    base = unwrap_peft(model)
    config = copy.deepcopy(base.config)
    config.dtype = dtype
    with temporary_directory() as root, temporary_errors():
        save_config(config, root)
        if getattr(config, "auto_map", None):
            custom_object_save(base, root, config=config)
        if base.can_generate():
            # not save_pretrained, which refuses some generation configs that models ship with
            (root / "generation_config.json").write_text(base.generation_config.to_json_string())
        save_tokenizer(tokenizer, root)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return {f"{EXPORT}/{path.relative_to(root)}": path.read_bytes() for path in found}
