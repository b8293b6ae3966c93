"""Whether a Hugging Face export is complete enough to be evaluated."""

from __future__ import annotations

from pathlib import Path

from verl_ext.commands import program
from verl_ext.errors import UserError
from verl_ext.files import parse_json

SHARD_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own bound on a header."""


def check_export(export: Path) -> None:
    """Refuse an export that vLLM would fail on only after seconds of loading.

    Args:
        export: directory that should hold `config.json`, safetensors weights, a tokenizer and a chat template.

    Raises:
        UserError: one of them is missing or cannot be read; the message says which.
    """
    if not (export / "config.json").is_file():
        raise UserError(
            f"{export} has no config.json; add hf_model to trainer.checkpoint.save_contents, or export the checkpoint"
        )
    _read_object(export / "config.json")
    _check_weights(export)
    _check_tokenizer(export)


def _check_weights(export: Path) -> None:
    index = export / SHARD_INDEX
    shards = _shards_of(index) if index.is_file() else sorted(export.glob("*.safetensors"))
    if not shards:
        from_shards = (export.parent / "fsdp_config.json").exists()
        remedy = f"run `{program('checkpoint')} export {export.parent}`" if from_shards else "export the model again"
        raise UserError(f"{export} has no *.safetensors weights; {remedy}")
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(f"{index} names missing shards ({', '.join(missing)}); export the model again")
    for shard in shards:
        _check_shard(shard)


def _shards_of(index: Path) -> list[Path]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} has no weight_map of file names; export the model again")
    if strangers := sorted(name for name in set(weight_map.values()) if Path(name).name != name):
        raise UserError(f"{index} names {strangers[0]}, which is not in its directory; export the model again")
    return [index.parent / name for name in sorted(set(weight_map.values()))]


def _check_shard(shard: Path) -> None:
    """An export that was cut off leaves a file shorter than its own header says.

    The format: 8 bytes of little-endian header length, the JSON header with each tensor's byte range, the tensors
    (https://huggingface.co/docs/safetensors).
    """
    try:
        with open(shard, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(header_bytes, MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{shard} is not a safetensors file ({error}); export the model again") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if shard.stat().st_size != expected:
        raise UserError(f"{shard} is {shard.stat().st_size} bytes long, not {expected}; export the model again")


def _check_tokenizer(export: Path) -> None:
    if not any((export / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{export} has no tokenizer; save the tokenizer with the weights")
    if (export / "chat_template.jinja").is_file():
        return
    settings = export / "tokenizer_config.json"
    if not settings.is_file() or not _read_object(settings).get("chat_template"):
        raise UserError(
            f"{export} has no chat template; save one with the tokenizer, such as that of the instruct model"
        )


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); export the model again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; export the model again")
    return content
