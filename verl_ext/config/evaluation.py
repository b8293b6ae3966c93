"""The keys `eval.*`: which recipe a run is evaluated by, and on which GPUs beside the training."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, ListConfig

from verl_ext.config.recipes import default_recipe, find_recipe
from verl_ext.errors import UserError
from verl_ext.processes import DEVICES

_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)


def check_evaluation_keys(config: DictConfig) -> None:
    """Refuse values of `eval` that cannot work.

    Raises:
        UserError: the key, its value and what it may be.
    """
    recipe = config.eval.recipe
    if recipe is not None and not (isinstance(recipe, str) and recipe):
        raise UserError(f"eval.recipe is {recipe!r}; it must be a name in recipes/eval/, the path of a file, or null")
    if recipe is not None:
        find_recipe("eval", recipe, "eval.recipe")
    eval_devices(config)
    if config.eval.watch and "hf_model" not in config.trainer.checkpoint.save_contents:
        raise UserError(
            "eval.watch=true evaluates the export of each checkpoint; put hf_model into trainer.checkpoint."
            "save_contents"
        )


def evaluation_recipe(config: DictConfig) -> str:
    """Name or file of the recipe that the run is evaluated by."""
    return config.eval.recipe or default_recipe("eval")


def eval_devices(config: DictConfig) -> list[str] | None:
    """`eval.devices` as names for `CUDA_VISIBLE_DEVICES`; None where it is null.

    Raises:
        UserError: it names no GPU, or one twice, or something else.
    """
    value = config.eval.devices
    if value is None:
        return None
    names = [_device(item, value) for item in (value if isinstance(value, ListConfig) else str(value).split(","))]
    if not names or len(set(names)) < len(names):
        raise UserError(f"eval.devices is {_shown(value)}; it must name at least one GPU, and each once, or be null")
    return names


def evaluation_environment(config: DictConfig) -> dict[str, str]:
    """The environment of an evaluation beside the training; what the user has set stays.

    Each rank has its share of the cores as threads. vLLM must not have more on a CPU: its threads wait for each other
    at the end of every operation, and with all cores, one of them would always wait for a rank to let it run.
    """
    share = max(1, len(os.sched_getaffinity(0)) // (config.trainer.n_gpus_per_node + 1))
    environment = {"OMP_NUM_THREADS": str(share), **os.environ}
    names = eval_devices(config)
    return environment if names is None else {**environment, DEVICES: ",".join(names)}


def _device(item: Any, value: Any) -> str:
    name = str(item).strip()
    if not _DEVICE.fullmatch(name):
        raise UserError(
            f"eval.devices is {_shown(value)}; name GPUs by number or by id as nvidia-smi -L lists them, such as 7, "
            "[6,7] or GPU-5a1b2c3d"
        )
    return str(int(name)) if name.isdecimal() else name


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, ListConfig) else value)
