"""Where each tensor of an export lies, so that every rank can write its own rows into the same files.

The format: 8 bytes with the header's length, a JSON header, the tensors' bytes one behind another
(https://github.com/huggingface/safetensors#format). The library's own writer needs all tensors of a file in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from huggingface_hub import split_state_dict_into_shards_factory

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Form:
    """Shape and number type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one row, or of the one number of a tensor without axes."""
        return prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """Where a tensor begins: the file, and the byte counted from the file's start."""

    file: str
    offset: int


class SafetensorsLayout:
    """The files of an export.

    Args:
        forms: shape and type by tensor name.
        max_shard_bytes: largest size of one file's tensors; a larger tensor has a file of its own.

    Attributes:
        forms: shape and type by tensor name.
        headers: what stands before the tensors, by file.
        sizes: bytes by file.
        slots: place by tensor name.
        index: content of INDEX, None for a single file.
    """

    def __init__(self, forms: Mapping[str, Form], max_shard_bytes: int) -> None:
        split = split_state_dict_into_shards_factory(
            dict(forms),
            get_storage_size=lambda form: form.num_bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_bytes,
        )
        self.forms = dict(forms)
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.slots: dict[str, Slot] = {}
        for file, names in split.filename_to_tensors.items():
            self._place(file, names)
        self.index = self._index(split.tensor_to_filename) if split.is_sharded else None

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(self.sizes.values())

    def _place(self, file: str, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, position = {}, 0
        for name in sorted(names, key=lambda name: -self.forms[name].dtype.itemsize):  # keeps every tensor aligned
            form = self.forms[name]
            begins[name] = position
            header[name] = {
                "dtype": DTYPE_NAMES[form.dtype],
                "shape": list(form.shape),
                "data_offsets": [position, position + form.num_bytes],
            }
            position += form.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.headers[file] = len(text).to_bytes(8, "little") + text
        self.sizes[file] = len(self.headers[file]) + position
        for name, begin in begins.items():
            self.slots[name] = Slot(file, len(self.headers[file]) + begin)

    def _index(self, files: Mapping[str, str]) -> bytes:
        total = sum(form.num_bytes for form in self.forms.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(files)}, indent=2).encode()
