"""Reads what `torch.save` wrote without running code that the file brings: a checkpoint may be somebody else's."""

from __future__ import annotations

import logging
import pickle
import typing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch.distributed import tensor as _  # noqa: F401 - names DTensor and its parts as safe
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from verl_ext.errors import UserError

_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
"""What an array is made by; its module has another name in NumPy 2."""
_OF_RANDOM_STATES = (
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
)
_OF_OPTIMIZERS = (
    *(DictConfig, ListConfig, AnyNode, Metadata, ContainerMetadata),  # verl hands its betas on as they stand in YAML
    *(defaultdict, dict, list, int),
    (typing.Any, "typing.Any"),
)
ALLOWED = (*_OF_RANDOM_STATES, *_OF_OPTIMIZERS)
"""What shards of verl hold beside tensors and plain values; none of it does anything when it is made."""


@contextmanager
def _without_groups() -> Iterator[None]:
    """Shards name the process groups of their run; torch warns of each that this process does not have."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_shard(path: Path) -> Any:
    """What one rank saved, its tensors mapped into memory and read on access.

    Raises:
        UserError: it holds anything that could run code when it is loaded, or is no such file.
    """
    with safe_globals(list(ALLOWED)), _without_groups():
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (EOFError, RuntimeError) as error:  # how torch tells of an empty file and of one that was cut
            raise UserError(f"{path} cannot be read; it is damaged, or no file of torch.save") from error
        except pickle.UnpicklingError as error:
            strangers = get_unsafe_globals_in_checkpoint(path)
            if not strangers:
                raise UserError(f"{path} cannot be read; it is damaged, or no file of torch.save") from error
            raise UserError(
                f"{path} is not loaded, for it names {', '.join(sorted(strangers))}, which may run code; take another "
                "checkpoint, or, where you trust it and need these, allow them by torch.serialization."
                "add_safe_globals in the module that model.external_lib names"
            ) from error
