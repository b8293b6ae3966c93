"""Looks at the model and data files that a configuration names, before torchrun starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError, first_line_of
from verl_ext.remote_code import require_no_remote_code_in

ORIGIN_KEY = "converted_from"
"""Column of converted data files: file and row that a row was converted from, for messages."""


def place_of(name: str, row: int, record: Mapping[str, Any]) -> str:
    """File and row for a message; of a converted file also those that the row was converted from."""
    origin = record.get(ORIGIN_KEY)
    return f"{name} row {row}" if not isinstance(origin, str) else f"{origin} ({name} row {row})"


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


def is_hub_name(model: str) -> bool:
    """Whether `model.partial_pretrain` is a name on the model hub, `MODEL` or `OWNER/MODEL`, and not a path.

    A name is a path if it exists, or if its parent directory exists or is one that the pipeline creates.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?", model, re.ASCII) or Path(model).exists():
        return False
    owner, slash, _ = model.rpartition("/")
    return not slash or not (owner in ("data", "checkpoints") or Path(owner).is_dir())


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


def read_json(path: Path) -> dict[str, Any]:
    """The content of one of a model's JSON files.

    Raises:
        UserError: it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise UserError(f"{path.absolute()} is not valid JSON ({first_line_of(error)}); restore the model") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.absolute()} is not a JSON object; restore the model")
    return content


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


def parse_chat_template(text: str) -> None:
    """Parse a template as transformers does, with its tag `generation`; nothing is rendered.

    Raises:
        UserError: it has a syntax error, or cannot be compiled.
    """
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from verl_ext.rendering import EndlessTemplate, rendering

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        with rendering():  # Jinja computes constant expressions when it compiles
            Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).from_string(text)
    except EndlessTemplate as error:
        raise UserError(
            "data.chat_template cannot be compiled: one of its constant expressions takes too long; correct it"
        ) from error
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f"line {line}: "
        raise UserError(
            f"data.chat_template is not a Jinja template ({where}{first_line_of(error)}); correct it"
        ) from error


def untrained_loss(model: str) -> float | None:
    """Loss of random guessing, for a model directory whose weights were never trained.

    Initialization sets the vectors of a transformer (norms and biases) to 0 or 1, and the first optimizer step moves
    them. So the weights are untrained if every vector in their files still is what initialization made it.

    Args:
        model: `model.partial_pretrain`.

    Returns:
        The logarithm of the vocabulary's size, in nats per token; None for trained weights, and where the weights are
        not in a local directory, not in safetensors files, or without vectors.
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
                for name in tensors.keys():  # noqa: SIM118 - this is no mapping
                    if len(tensors.get_slice(name).get_shape()) != 1:
                        continue
                    num_vectors += 1
                    values = set(tensors.get_tensor(name).unique().tolist())
                    if values not in ({0.0}, {1.0}):
                        return None
        config = json.loads((directory / "config.json").read_text())
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (SafetensorError, OSError, ValueError, AttributeError):
        return None  # the ranks, which load the whole model, say what is wrong with it
    return math.log(vocabulary) if num_vectors and vocabulary else None


def file_list(files: str | list[str] | None) -> list[str]:
    """`data.train_files` and the like as a list; null is the empty list."""
    if files is None:
        return []
    return list(files) if isinstance(files, list) else [str(files)]


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


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """What reads a file runs inside: its end may be whole and its pages damaged.

    Raises:
        UserError: it cannot be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        fix = "prepare it again"
        if path.suffix.lower() != ".parquet":
            fix = "give a file that ends in .parquet, .jsonl, .json, .csv or .tsv"
        raise UserError(f"{path} is not a readable parquet file ({first_line_of(error)}); {fix}") from error


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
