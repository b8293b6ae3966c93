"""Sections of a configuration as plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf


def as_dict(section: Mapping[str, Any] | DictConfig, resolve: bool = True) -> dict[str, Any]:
    """A section with all that is nested in it; `resolve` where interpolations are to be replaced by what they name."""
    config = section if isinstance(section, DictConfig) else OmegaConf.create(dict(section))
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=resolve))
