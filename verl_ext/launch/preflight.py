"""Looks at the model and data files that a configuration names, before torchrun starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_ext.data.config import file_list
from verl_ext.data.dataset import reading_parquet
from verl_ext.errors import UserError
from verl_ext.model_files import is_hub_name, read_json
from verl_ext.remote_code import require_no_remote_code_in


def check_model(config: Any) -> None:
    """A model given as a path must hold a config.json; a hub name is left to transformers, unless it is offline.

    Raises:
        UserError: the model cannot be used.
    """
    model = str(config.model.partial_pretrain)
    path = Path(model).expanduser()
    if is_hub_name(model):
        require_cached_if_offline(model)
        return
    if "://" in model:
        return
    if not path.is_dir():
        raise UserError(
            f"there is no model at {path.absolute()} (model.partial_pretrain); give a directory or a hub name"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path.absolute()} holds no config.json, so it is no Hugging Face model; correct model.partial_pretrain"
        )
    content = read_json(path / "config.json")
    check_weights(path)
    if not config.model.trust_remote_code:
        require_no_remote_code_in(str(path), content)


def require_cached_if_offline(model: str) -> None:
    """Refuse a hub name that transformers could not load, as HF_HUB_OFFLINE is set and its cache lacks the model."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return
    try:
        is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # the hub has no such names
        is_cached = False
    if not is_cached:
        raise UserError(
            f"there is no model at {Path(model).absolute()}, and HF_HUB_OFFLINE is set but the hub's cache "
            f"{constants.HF_HUB_CACHE} has no {model}; correct model.partial_pretrain, or download the model first"
        )


def check_weights(model: Path) -> None:
    """A model's directory must have every file that its index of weights names.

    Raises:
        UserError: one is missing, as after a download that was interrupted.
    """
    for index in model.glob("*.index.json"):
        weight_map = read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index.absolute()} does not map weights to files; download or copy the model again")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (model / name).is_file()]
        if missing:
            raise UserError(
                f"{model.absolute()} lacks {missing[0]}, one of {len(missing)} missing files of {index.name}; "
                "download or copy the model again"
            )


def check_own_chat_template(config: Any) -> None:
    """Where `data.chat_template` is null, a local model must have a template of its own.

    Raises:
        UserError: it has none, as base models often have not.
    """
    if config.data.chat_template is not None:
        return
    path = Path(str(config.model.partial_pretrain)).expanduser()
    settings = path / "tokenizer_config.json"
    has_file = (path / "chat_template.jinja").is_file() or any(path.glob("additional_chat_templates/*.jinja"))
    if settings.is_file() and not has_file and not read_json(settings).get("chat_template"):
        raise UserError(
            f"the tokenizer of {path.absolute()} has no chat template; set data.chat_template to a Jinja file, or take "
            "the instruct variant of the model"
        )


def check_data(config: Any) -> None:
    """Every data file must be readable parquet with the wanted column, and the training set must fill one batch."""
    rows = {}
    for key in ("train_files", "val_files"):
        files = file_list(getattr(config.data, key))
        rows[key] = sum(check_parquet(Path(name).expanduser(), key, config) for name in files)
        if files and rows[key] == 0:
            or_none = ", or val_files=null for none" if key == "val_files" else ""
            raise UserError(f"data.{key} holds no rows ({', '.join(files)}); give a data set{or_none}")
    if not rows["train_files"]:
        raise UserError("data.train_files is empty; give at least one parquet file")
    limit = config.data.train_max_samples
    rows_used = min(rows["train_files"], limit) if limit > 0 else rows["train_files"]
    if rows_used < config.data.train_batch_size:
        raise UserError(
            f"the training set has {rows_used} rows, fewer than one global batch of {config.data.train_batch_size}; "
            f"set data.train_batch_size to {rows_used} or less"
        )


def check_parquet(path: Path, key: str, config: Any) -> int:
    """Number of rows of a parquet file whose columns are those that the configuration names."""
    from pyarrow import parquet

    if re.match(r"[A-Za-z0-9]+:/", str(path)):  # a path has one slash where the address had two
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if not path.is_file():
        raise UserError(
            f"data.{key} names {path.absolute()}, which is not a file; correct the path or prepare the data"
        )
    with reading_parquet(path):
        metadata = parquet.read_metadata(path)
    columns = metadata.schema.to_arrow_schema().names
    for setting, column in wanted_columns(config).items():
        if column not in columns:
            raise UserError(f"{path} has no column '{column}' ({setting}); its columns are {', '.join(columns)}")
    return metadata.num_rows


def wanted_columns(config: Any) -> dict[str, str]:
    """Setting to column name of what a data file must have; a data set class of the user's own decides for itself."""
    if config.stage == "grpo":
        return {"data.prompt_key": config.data.prompt_key}
    if config.data.custom_cls.path is not None:
        return {}
    if config.data.multiturn.enable:
        return {"data.multiturn.messages_key": config.data.multiturn.messages_key}
    return {"data.prompt_key": config.data.prompt_key, "data.response_key": config.data.response_key}
