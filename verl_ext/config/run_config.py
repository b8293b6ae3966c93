"""The `config.yaml` of a run: reads it as data only, since it may be untrusted, and identifies it by a digest."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_ext.config.secrets import leaves
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import yaml_text

NOT_IDENTITY = (
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device", "trainer.log_every", "data.num_workers",
    "trainer.preemption", "trainer.checkpoint.async_save", "trainer.checkpoint.verify", "eval", "health",
    "trainer.log_sample_tokens", "trainer.wandb_proxy", "algorithm.adv_estimator", "algorithm.use_kl_in_reward",
)  # fmt: skip
"""Keys that do not change a run's identity: where it runs, on how many processes, and how it is monitored."""
ADDED_LATER = (
    "trainer.log_sample_tokens", "trainer.wandb_proxy", "algorithm.adv_estimator", "algorithm.use_kl_in_reward",
)  # fmt: skip
"""Keys of `NOT_IDENTITY` that digests omit instead of setting to null, so that digests without them stay valid."""
VALIDATION_SECTIONS = ("data.", "reward.", "controller.", "latency.", "configurations.")
"""Sections that determine what a validation measures. A setting counts unless it is among the following."""
NOT_MEASURED = (
    "data.balance_dp_token", "data.eval_every_steps", "data.max_tokens_per_gpu", "data.max_unreadable_images",
    "data.micro_batch_size", "data.micro_batch_size_per_gpu", "data.num_tokenizers", "data.num_workers", "data.packing",
    "data.token_cache", "data.use_shm", "reward.isolation", "reward.num_workers", "controller.dropout",
    "controller.hidden", "controller.importance_file", "controller.init_from", "controller.max_active",
    "controller.max_encodings", "controller.min_active", "controller.topk_choices", "latency.configurations",
    "latency.repeats", "configurations.full_model_steps", "configurations.lowest_tier_steps",
    "configurations.min_active", "configurations.share", "configurations.tier_weights", "configurations.topk_choices",
)  # fmt: skip
"""Settings of these sections that only determine how a run trains, or how fast it is."""
TRAINING_DATA = ("data.train_files", "data.train_max_samples")
"""Settings that count only if a run is validated on its training data."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a run's resolved configuration as nested values.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or has an interpolation. A resolved configuration has
            none, and an interpolation could read this machine's environment, as in `${oc.env:HF_TOKEN}`.
    """
    try:
        config = OmegaConf.load(StringIO(yaml_text(path)))
        values = OmegaConf.to_container(config, resolve=False)
        texts = [text for text in itertools.chain.from_iterable(leaves(values)) if isinstance(text, str)]
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        # ValueError: invalid UTF-8, or a huge number
        why = "it is nested too deeply" if isinstance(error, RecursionError) else first_line_of(error)
        raise UserError(f"{path} cannot be read ({why}); correct it, or work on a copy of it") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} is not a YAML mapping; put the run's resolved configuration there")
    for text in texts:
        if "${" in text.replace("\\${", ""):
            raise UserError(f"{path} has the interpolation {text!r}; write the value itself")
    return cast("dict[str, Any]", values)


def refuse_interpolations(values: Mapping[str, Any]) -> None:
    """Refuse a configuration that `read_config_file` would refuse, because a name or a resolved value has `${`.

    Raises:
        UserError: the message names the key.
    """
    for name, value in leaves(values):
        if "${" in name or (isinstance(value, str) and "${" in value):
            raise UserError(f"{name} is {value!r}, which has the characters '${{' of an interpolation; remove them")


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key; empty mappings and lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat_values(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def config_digest(values: Mapping[str, Any]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of nested values, without the keys in `NOT_IDENTITY`."""
    copy = OmegaConf.create(dict(values))
    for key in NOT_IDENTITY:
        section, _, name = key.rpartition(".")
        if key in ADDED_LATER:
            OmegaConf.select(copy, section, default=OmegaConf.create()).pop(name, None)
        else:
            OmegaConf.update(copy, key, None)
    return hashlib.sha256(OmegaConf.to_yaml(copy, sort_keys=True).encode()).hexdigest()[:16]


def num_updates(batch_size: int, mini_batch_size: int | None, num_passes: int = 1) -> int:
    """Number of optimizer updates in a step: one for each mini-batch, in each pass over the step's samples."""
    return num_passes * (batch_size // (mini_batch_size or batch_size))


def changed_files(previous: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files whose content has changed, from two records of digests by path; both must have the file."""
    return [path for path, digest in now.items() if previous.get(path, digest) != digest]


def changes_validation(changes: Iterable[str], data: Mapping[str, Any]) -> bool:
    """Whether validations before and after some settings changed measure different things.

    Args:
        changes: dotted keys of the changed settings.
        data: the run's section `data`.
    """
    ignored = {*NOT_MEASURED}
    if data.get("eval_split") != "train":
        ignored |= {*TRAINING_DATA}
    if data.get("eval_batches", -1) == -1:  # a validation takes all of the data
        ignored.add("data.train_batch_size")
    return any(key.startswith(VALIDATION_SECTIONS) and key not in ignored for key in changes)
