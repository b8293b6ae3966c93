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
VALIDATION_KEYS = ("reward.", "data.val_", "data.eval_split", "data.eval_batches")
"""Beginnings of the settings that determine what a validation measures."""
NOT_MEASURED = ("reward.num_workers", "reward.isolation")
"""Settings among these that do not change a reward."""


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


def changed_files(previous: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files whose content has changed, from two records of digests by path; both must have the file."""
    return [path for path, digest in now.items() if previous.get(path, digest) != digest]


def changes_validation(changes: Iterable[str]) -> bool:
    """Whether validations before and after some settings changed measure different things."""
    return any(key.startswith(VALIDATION_KEYS) and key not in NOT_MEASURED for key in changes)
