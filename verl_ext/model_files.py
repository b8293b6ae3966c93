"""Checks a model's files, loads them without unwanted code, and writes files that earlier libraries can read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

CONTROLLER_TYPE = "budget_controller"
"""`model_type` in the `config.json` of an exported budget controller."""
EARLIER_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Types of rotary embeddings in transformers 4.57."""
EARLIER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""Former names of keys, by model type."""
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
"""Keys that can name an attention function on the Hub."""
_FIX = "remove that key from it, or set trust_remote_code=true if you trust its author"


def load_pretrained_strict(loader: Any, path: str, **arguments: Any) -> Any:
    """Call `from_pretrained`, and refuse missing weights, which transformers would only initialize randomly.

    Raises:
        UserError: weights are missing.
    """
    model, found = loader.from_pretrained(path, output_loading_info=True, **arguments)
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them; restore its files, or "
            "specify another model"
        )
    return model


def require_no_controller(name: str, content: Mapping[str, Any]) -> None:
    """Refuse the configuration of an exported budget controller, which transformers cannot load as a model.

    Raises:
        UserError: the message names the model.
    """
    if content.get("model_type") == CONTROLLER_TYPE:
        raise UserError(
            f"{name} is a budget controller, not a language or vision-language model; specify the model that it "
            "controls, or an SFT run"
        )


def save_config(config: PreTrainedConfig, directory: Path) -> None:
    """Write `config.json` with rotary embeddings in both formats: `rope_parameters`, and `rope_theta` etc.

    transformers 4 ignores `rope_parameters` and would silently use defaults.
    """
    config.save_pretrained(directory)
    path = directory / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    _add_earlier_rope_keys(content, config.to_dict())
    _write_json(path, content)


def _add_earlier_rope_keys(content: dict[str, Any], config: dict[str, Any]) -> None:
    """Add the keys to a configuration and to its vision and text parts; transformers does not write defaults."""
    content |= {key: value for key, value in earlier_rope_keys(config).items() if content.get(key) is None}
    for name, part in config.items():
        if name.endswith("_config") and isinstance(content.get(name), dict):
            _add_earlier_rope_keys(content[name], part)


def earlier_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that transformers 4 reads instead of `rope_parameters`; empty for types that it does not know."""
    rope = config.get("rope_parameters") or {}
    of_window = rope.get("sliding_attention")
    if of_window is not None:  # Gemma 3: two kinds of layers
        rope = rope.get("full_attention") or {}
    if rope.get("rope_type") not in EARLIER_ROPE_TYPES or "rope_theta" not in rope:
        return {}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    keys = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaling != {"rope_type": "default"} else None}
    if "partial_rotary_factor" in rope:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if of_window is not None:
        keys["rope_local_base_freq"] = of_window["rope_theta"]
    names = EARLIER_NAMES.get(config.get("model_type", ""), {})
    return {names.get(key, key): value for key, value in keys.items()}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, directory: Path) -> None:
    """Write a tokenizer or a processor, and the files that transformers 5 no longer writes.

    These are `special_tokens_map.json`, `vocab.json`, `merges.txt` for BPE, and `added_tokens.json` if the vocabulary
    lacks some tokens. `tokenizer_config.json` uses the names that transformers 4 knows.
    """
    from transformers import PreTrainedTokenizerBase

    tokenizer.save_pretrained(directory)
    own = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer.tokenizer
    special: dict[str, Any] = dict(own.special_tokens_map)
    if own.extra_special_tokens:
        special["additional_special_tokens"] = own.extra_special_tokens
    _write_json(directory / "special_tokens_map.json", special)
    _rename_in_tokenizer_config(directory / "tokenizer_config.json")
    if own.is_fast:
        _write_vocabulary(json.loads(own.backend_tokenizer.to_str()), directory)


def _rename_in_tokenizer_config(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    _write_json(path, content)


def _write_vocabulary(tokenizer: dict[str, Any], directory: Path) -> None:
    """Write the vocabulary and merges of a `tokenizer.json` to separate files."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces and their scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    ordered = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    (directory / "vocab.json").write_text(text, encoding="utf-8")
    merges = [tuple(merge) for merge in tokenizer["model"].get("merges") or ()]
    if merges and not any(" " in part or "\n" in part for merge in merges for part in merge):  # a line has two words
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
        (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["content"] not in vocabulary}
    if added:
        _write_json(directory / "added_tokens.json", added)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def check_model_files(model: str, trusted: bool) -> None:
    """Refuse a `model.partial_pretrain` that cannot be loaded; transformers checks Hub names unless offline.

    Raises:
        UserError: files are missing or damaged, or the model would run code.
    """
    path = Path(model).expanduser()
    if is_hub_name(model):
        return require_cached_or_reachable(model)
    if "://" in model:
        return None
    if not path.is_dir():
        raise UserError(
            f"there is no model at {path.absolute()} (model.partial_pretrain); specify a directory or a Hub model ID"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path.absolute()} has no config.json, so it is not a Hugging Face model; correct model.partial_pretrain"
        )
    content = read_json(path / "config.json")
    require_no_controller(str(path), content)
    require_readable(path)
    require_all_weights(path)
    if not trusted:
        require_no_remote_code_in(str(path), content)


def require_readable(model: Path) -> None:
    """Refuse a model's directory with a file that this user may not read; transformers reports it as missing."""
    for path in sorted(model.iterdir()):
        if not os.access(path, os.R_OK) and path.exists():
            raise UserError(f"cannot read {path.absolute()} (no permission); ask its owner to make it readable")


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention scores are capped, as in Gemma 2; sdpa cannot do this."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def require_capped_scores(attention: str, config: PreTrainedConfig) -> None:
    """Refuse sdpa for a model that caps attention scores; transformers would only warn and ignore the cap."""
    if attention == "sdpa" and caps_scores(config):
        raise UserError(
            f"model.attn_implementation=sdpa cannot cap attention scores, which {config.model_type} models need; set "
            "it to auto or eager"
        )


def is_hub_name(model: str) -> bool:
    """Whether `model.partial_pretrain` is a name on the Hugging Face Hub, `MODEL` or `OWNER/MODEL`, and not a path.

    A name is a path if the path or its parent directory exists, or if the pipeline creates the parent directory.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?", model, re.ASCII) or Path(model).exists():
        return False
    owner, slash, _ = model.rpartition("/")
    return not slash or not (owner in ("data", "checkpoints") or Path(owner).is_dir())


def require_cached_or_reachable(model: str) -> None:
    """Refuse a Hub name that the cache lacks if HF_HUB_OFFLINE is set or the Hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    with suppress(ValueError):  # not a valid Hub name
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
    is_offline = constants.HF_HUB_OFFLINE
    if is_offline or not hub_answers():
        why = "HF_HUB_OFFLINE is set" if is_offline else f"{constants.ENDPOINT} does not answer"
        raise UserError(
            f"there is no model at {Path(model).absolute()}, and {why}, but the Hub's cache {constants.HF_HUB_CACHE} "
            f"has no {model}; correct model.partial_pretrain, or download the model first"
        )


def hub_answers(timeout_s: float = 10.0) -> bool:
    """Whether the Hub is reachable; checked first, because each of its libraries would retry for half a minute."""
    import requests  # here, because the GPU check runs where it may be missing
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=timeout_s)
    except requests.exceptions.SSLError:  # the Hub's library may know other certificates
        return True
    except requests.RequestException:
        return False
    return True


def require_all_weights(model: Path) -> None:
    """Refuse a model's directory that lacks a file of its weight index, for example after an interrupted download."""
    for index in model.glob("*.index.json"):
        weight_map = read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index.absolute()} does not map weights to files; download or copy the model again")
        missing = [name for name in sorted(set(weight_map.values())) if not (model / name).is_file()]
        if missing:
            raise UserError(
                f"{model.absolute()} lacks {missing[0]}, one of {len(missing)} missing files of {index.name}; "
                "download or copy the model again"
            )


def require_chat_template(model: str) -> None:
    """Refuse a local model whose tokenizer has no chat template, which is common for base models."""
    path = Path(model).expanduser()
    settings = path / "tokenizer_config.json"
    has_file = (path / "chat_template.jinja").is_file() or any(path.glob("additional_chat_templates/*.jinja"))
    if settings.is_file() and not has_file and not read_json(settings).get("chat_template"):
        raise UserError(
            f"the tokenizer of {path.absolute()} has no chat template; set data.chat_template to a Jinja file, or use "
            "the instruct variant of the model"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model.

    Raises:
        UserError: the file is not a JSON object.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path.absolute()} ({error.strerror}); restore the model") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path.absolute()} is not valid JSON ({first_line_of(error)}); restore the model") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.absolute()} is not a JSON object; restore the model")
    return content


def untrained_loss(model: str) -> float | None:
    """Loss of random guessing, for a model directory whose weights were never trained.

    Initialization sets the vectors of a transformer (norms and biases) to 0 or 1, and the first optimizer step changes
    them. So the weights are untrained if every vector in the files still has its initial value.

    Returns:
        The logarithm of the vocabulary size, in nats per token; None if the weights are trained, are not in a local
        directory or in safetensors files, or have no vectors.
    """
    directory = Path(model).expanduser()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    from safetensors import SafetensorError, safe_open

    num_vectors = 0
    try:
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - this is not a mapping
                    if len(tensors.get_slice(name).get_shape()) != 1:
                        continue
                    num_vectors += 1
                    values = set(tensors.get_tensor(name).unique().tolist())
                    if values not in ({0.0}, {1.0}):
                        return None
        config = json.loads((directory / "config.json").read_text())
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (SafetensorError, OSError, ValueError, AttributeError):
        return None  # the ranks load the full model and report the problem
    return math.log(vocabulary) if num_vectors and vocabulary else None


# Custom code of models


def require_no_remote_code(name: str, trusted: bool, local_files_only: bool = False) -> None:
    """Refuse a model whose `config.json` would make transformers run code that the user did not enable.

    With `trust_remote_code=False`, transformers 4.57 ignored custom classes but followed two keys: `trust_remote_code`
    in a configuration (CVE-2026-5241), and an attention function on the Hub (CVE-2026-4372). transformers 5 no longer
    follows the first, and accepts the second only from verified organizations. The check does not depend on the
    release.

    Args:
        name: a directory, or a name on the Hub.
        local_files_only: whether to avoid the Hub.

    Raises:
        UserError: the configuration would run code.
    """
    if not trusted:
        require_no_remote_code_in(name, config_of(name, local_files_only))


def require_no_remote_code_in(name: str, content: Mapping[str, Any]) -> None:
    """Like `require_no_remote_code`, for a configuration that has already been read.

    Raises:
        UserError: the configuration would make transformers run code.
    """
    for key, value in config_entries(content):
        if key == "trust_remote_code" and value:
            raise UserError(f"{name} requires custom code (trust_remote_code in its config.json); {_FIX}")
        if key in _ATTENTION and "/" in str(value):
            raise UserError(f"{name} requires attention code from the Hub ({key} in its config.json); {_FIX}")


def config_of(name: str, local_files_only: bool = False) -> dict[str, Any]:
    """The model's configuration as transformers reads it; empty if it is missing, which the loader reports."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(name, local_files_only=local_files_only)[0]
    except (OSError, ValueError):
        return {}


def config_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, item
            yield from config_entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from config_entries(item)
