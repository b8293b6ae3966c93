"""What an attempt records about its origin: command, code, packages, environment and settings, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import join
from typing import Any

from verl_ext.config.run_config import flat_values, read_config_file
from verl_ext.config.schema import as_dict, keys
from verl_ext.config.secrets import masked, without_secrets
from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.paths import CHECKOUT

PACKAGES = (
    *("verl-ext", "verl", "torch", "transformers", "vllm", "ray", "tensordict", "peft", "flash-attn", "accelerate"),
    *("numpy", "hydra-core", "wandb", "liger-kernel"),
)
ENVIRONMENT = re.compile(
    r"(CUDA|NCCL|GLOO|OMP|MKL|TORCH|PYTORCH|VERL|VLLM|SLURM_JOB)_\w+|(HF_HUB|TRANSFORMERS)_OFFLINE|HF_HOME|WANDB_MODE"
    r"|TOKENIZERS_PARALLELISM|PYTHONHASHSEED|NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT"
)
"""Variables that are recorded, unless they hold a secret."""


def launch_provenance(program: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the facts that the launcher knows.

    Args:
        program: start of the command, such as `bash run_sft.sh`.
        words: its arguments.
    """
    recorded = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    return {
        "command": f"{program} {join(map(masked, words))}".rstrip(),
        "git_commit": git_commit(CHECKOUT),
        "packages": package_versions(),
        "environment": {name: masked(value) for name, value in sorted(without_secrets(recorded).items())},
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages of `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit(checkout: Path | None) -> str | None:
    """Return the commit of a checkout or worktree from the files of `.git`; None without one."""
    if checkout is None:
        return None
    git = checkout / ".git"
    try:
        if git.is_file():  # a worktree
            git = checkout / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        if (shared / name).is_file():
            return (shared / name).read_text().strip()
        packed = re.search(rf"^(\w+) {re.escape(name)}$", (shared / "packed-refs").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return None if packed is None else packed[1]


def config_provenance(config: Any, previous: Path) -> dict[str, Any]:
    """Return which settings differ from their defaults and from the previous attempt.

    Args:
        config: the configuration of this attempt.
        previous: `config.yaml` of the previous attempt, which may be missing.

    Returns:
        `config_defaults`: default by dotted key. `config_changes`: previous and new value by dotted key, null if the
        key did not exist.
    """
    now = flat_values(as_dict(config))
    defaults = {name: key.default for name, key in keys(type(config)).items()}
    differing = {name: defaults[name] for name, value in now.items() if name in defaults and defaults[name] != value}
    changes = {}
    if previous.is_file():
        try:
            before = flat_values(read_config_file(previous))
            names = dict.fromkeys((*now, *before))
            changes = {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}
        except UserError as error:  # a damaged file must not stop training, which replaces it
            warn(f"the settings that changed since the previous attempt are not recorded: {error}")
    return {"config_defaults": differing, "config_changes": changes}
