"""What can be refused before torchrun starts: values that do not work together, files and columns that are missing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_ext.errors import UserError

CHOICES = {
    "model.attn_implementation": ("auto", "flash_attention_2", "sdpa", "eager"),
    "model.mixed_precision": ("auto", "bf16", "fp32"),
    "model.fsdp_config.model_dtype": ("fp32", "bf16", "fp16"),
    "optim.lr_scheduler": ("cosine", "wsd", "constant"),
    "data.truncation": ("error", "left", "right"),
    "trainer.device": ("auto", "cuda", "npu", "cpu"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.checkpoint.export_dtype": ("bf16", "fp16", "fp32"),
}
AT_LEAST_ONE = (
    "data.train_batch_size", "data.micro_batch_size_per_gpu", "data.max_length", "trainer.total_epochs",
    "trainer.log_every", "trainer.max_nonfinite_steps", "ulysses_sequence_parallel_size",
)  # fmt: skip
NULL_OR_AT_LEAST_ONE = ("trainer.total_training_steps", "trainer.max_ckpt_to_keep")


def check_values(config: DictConfig) -> None:
    """Refuse single values outside their range and settings that this pipeline cannot serve.

    Raises:
        UserError: the key, its value and what it may be.
    """
    for key, choices in CHOICES.items():
        if value_of(config, key) not in choices:
            raise UserError(f"{key} is '{value_of(config, key)}'; take one of {', '.join(choices)}")
    for key in AT_LEAST_ONE:
        require_positive(key, value_of(config, key))
    for key in NULL_OR_AT_LEAST_ONE:
        if value_of(config, key) is not None:
            require_positive(key, value_of(config, key))
    if config.model.strategy != "fsdp2":
        raise UserError(
            f"model.strategy is '{config.model.strategy}', but this trainer shards with fsdp2; set it to fsdp2"
        )
    if config.data.micro_batch_size is not None:
        raise UserError("data.micro_batch_size was dropped by verl; set data.micro_batch_size_per_gpu instead")
    check_save_contents(config)
    check_resume_path(config)


def value_of(config: DictConfig, dotted_key: str) -> object:
    """The value at a dotted key."""
    for name in dotted_key.split("."):
        config = config[name]
    return config


def require_positive(key: str, value: object) -> None:
    """Raise a `UserError` unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key} is {value!r}; it must be a whole number of at least 1")


def check_save_contents(config: DictConfig) -> None:
    """Known names only, and the weights among them; without optimizer or extra state a resume starts those anew."""
    known = {"model", "optimizer", "extra", "hf_model"}
    contents = set(config.trainer.checkpoint.save_contents)
    if contents - known:
        raise UserError(f"trainer.checkpoint.save_contents names {sorted(contents - known)}; known are {sorted(known)}")
    if "model" not in contents:
        raise UserError(
            "trainer.checkpoint.save_contents lacks 'model'; a checkpoint without weights cannot be resumed"
        )


def check_resume_path(config: DictConfig) -> None:
    """`resume_from_path`, where it is used, must name a `global_step_N` directory."""
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path is None:
        raise UserError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
    if path is not None and config.trainer.resume_mode != "disable":
        if not Path(path).is_dir() or not Path(path).name.startswith("global_step_"):
            raise UserError(f"trainer.resume_from_path is '{path}', which is no global_step_N directory")


def check_batch(config: DictConfig, world_size: int) -> None:
    """The global batch must divide over the data-parallel ranks; micro-batches may leave a remainder.

    Args:
        config: the resolved configuration.
        world_size: number of ranks on all nodes.
    """
    sequence_parallel = config.ulysses_sequence_parallel_size
    if world_size % sequence_parallel:
        raise UserError(
            f"ulysses_sequence_parallel_size {sequence_parallel} does not divide the {world_size} ranks; "
            "choose a divisor"
        )
    if sequence_parallel > 1 and not config.use_remove_padding:
        raise UserError("ulysses_sequence_parallel_size above 1 needs use_remove_padding=true")
    ranks, batch = world_size // sequence_parallel, config.data.train_batch_size
    if batch % ranks:
        near = max(batch // ranks, 1) * ranks
        raise UserError(
            f"data.train_batch_size {batch} does not divide over {ranks} data-parallel ranks; "
            f"set data.train_batch_size={near} or start another number of ranks"
        )


def check_model(config: DictConfig) -> None:
    """A model given as a path must hold a config.json; a hub name is left to transformers."""
    model = str(config.model.partial_pretrain)
    path = Path(model).expanduser()
    looks_like_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~")) and not path.parent.is_dir()
    if looks_like_hub_name or "://" in model:
        return
    if not path.is_dir():
        raise UserError(
            f"there is no model at {path.absolute()} (model.partial_pretrain); give a directory or a hub name"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path.absolute()} holds no config.json, so it is no Hugging Face model (model.partial_pretrain)"
        )
    try:
        json.loads((path / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path.absolute() / 'config.json'} is not valid JSON: {error}") from error


def file_list(files: str | ListConfig | list | None) -> list[str]:
    """`data.train_files` and the like as a list; null is the empty list."""
    if files is None:
        return []
    return list(files) if isinstance(files, Iterable) and not isinstance(files, str) else [str(files)]


def check_data(config: DictConfig) -> None:
    """Every data file must be readable parquet with the wanted column, and the training set must fill one batch."""
    rows = {}
    for key in ("train_files", "val_files"):
        files = file_list(config.data[key])
        rows[key] = sum(check_parquet(Path(name).expanduser(), key, config) for name in files)
        if files and rows[key] == 0:
            raise UserError(
                f"data.{key} holds no rows ({', '.join(files)}); give a data set, or val_files=null for none"
            )
    if not rows["train_files"]:
        raise UserError("data.train_files is empty; give at least one parquet file")
    limit = config.data.train_max_samples
    rows_used = min(rows["train_files"], limit) if limit > 0 else rows["train_files"]
    if rows_used < config.data.train_batch_size:
        raise UserError(
            f"the training set has {rows_used} rows, fewer than one global batch of {config.data.train_batch_size}; "
            f"set data.train_batch_size to {rows_used} or less"
        )


def check_parquet(path: Path, key: str, config: DictConfig) -> int:
    """Number of rows of a parquet file whose columns are those that the configuration names."""
    import pyarrow
    from pyarrow import parquet

    if "://" in str(path) or str(path).startswith("hdfs:"):
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if not path.is_file():
        raise UserError(
            f"data.{key} names {path.absolute()}, which does not exist; correct the path or prepare the data"
        )
    try:
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is not a readable parquet file ({str(error).splitlines()[0]}); prepare it again"
        ) from error
    columns = metadata.schema.to_arrow_schema().names
    for setting, column in wanted_columns(config).items():
        if column not in columns:
            raise UserError(f"{path} has no column '{column}' ({setting}); its columns are {', '.join(columns)}")
    return metadata.num_rows


def wanted_columns(config: DictConfig) -> dict[str, str]:
    """Setting to column name of what a data file must have; a data set class of the user's own decides for itself."""
    if config.data.custom_cls.path is not None:
        return {}
    if config.data.multiturn.enable:
        return {"data.multiturn.messages_key": config.data.multiturn.messages_key}
    return {"data.prompt_key": config.data.prompt_key, "data.response_key": config.data.response_key}
