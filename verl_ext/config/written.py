"""The `config.yaml` of a run, which may be somebody else's: it is data, and reads nothing of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_ext.errors import UserError, first_line_of
from verl_ext.yaml_text import yaml_text


def load_written(path: Path) -> DictConfig:
    """A run's resolved configuration.

    Raises:
        UserError: it cannot be read, is no YAML mapping, or has an interpolation, which a resolved one has not and by
            which it could take in this environment, `${oc.env:HF_TOKEN}`.
    """
    try:
        return _load(path)
    except RecursionError:
        raise UserError(
            f"{path} cannot be read (it is nested too deeply); correct it, or work on a copy of it"
        ) from None


def _load(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(StringIO(yaml_text(path)))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:  # ValueError: no UTF-8, or a huge number
        raise UserError(
            f"{path} cannot be read ({first_line_of(error)}); correct it, or work on a copy of it"
        ) from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} is no YAML mapping; put the run's resolved configuration there")
    for text in _texts(OmegaConf.to_container(config, resolve=False)):
        if "${" in text.replace("\\${", ""):
            raise UserError(f"{path} has the interpolation {text!r}; write the value itself")
    return config


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
