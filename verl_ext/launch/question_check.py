"""The questions about images that a configuration names, before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_ext.config.plain import as_dict
from verl_ext.data.question_sources import METRICS, QuestionSource, require_rows
from verl_ext.errors import UserError
from verl_ext.launch.prepare import is_within

OF_TEXTS: dict[str, object] = {
    "data.train_files": None,
    "data.val_files": None,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.prompt_dict_keys": None,
    "data.response_dict_keys": None,
    "data.multiturn.enable": False,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "data.multiturn.enable_thinking_key": "enable_thinking",
    "data.max_length": 1,
    "data.truncation": "error",
    "data.chat_template": None,
    "data.apply_chat_template_kwargs": {},
    "data.custom_cls.path": None,
    "data.custom_cls.name": None,
    "data.balance_dp_token": False,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.lora_adapter_path": None,
    "model.target_modules": "all-linear",
    "model.use_liger": False,
    "model.enable_gradient_checkpointing": False,
    "use_remove_padding": False,
    "ulysses_sequence_parallel_size": 1,
    "eval.watch": False,
    "eval.devices": None,
}
"""Settings of the stages that learn from texts: the value they must keep in those that learn from images."""


def check_questions(config: DictConfig, needed: Sequence[str], awaited: Sequence[Path] = ()) -> None:
    """Each data set is known or has files, and there is something for each split that is needed.

    Args:
        config: the resolved configuration.
        needed: splits.
        awaited: directories whose files are still to be prepared.

    Raises:
        UserError: which is wrong and how to mend it.
    """
    sources = {name: source_of(name, entry) for name, entry in as_dict(config.data.datasets).items()}
    for split in ("train", "val"):
        if split in needed and not any(source.size(split) for source in sources.values()):
            raise UserError(f"there is no question for {split}; give data.datasets.NAME.{split} a size, or -1 for all")
        for name, source in sources.items():
            if source.size(split) and not is_within(source.source, awaited):
                require_rows(name, source, split)


def source_of(name: str, entry: Any) -> QuestionSource:
    """An entry of `data.datasets`."""
    known = ("train", "val", "source", "metric", "images")
    if not isinstance(entry, Mapping) or not set(entry) <= set(known):
        raise UserError(f"data.datasets.{name} is {entry!r}; it must be a mapping of {', '.join(known)}")
    if entry.get("metric") not in (None, *METRICS):
        raise UserError(f"data.datasets.{name}.metric is {entry['metric']!r}; take one of {', '.join(METRICS)}")
    for split in known[:2]:
        size = entry.get(split, -1)
        if isinstance(size, bool) or not isinstance(size, int) or size < -1:
            raise UserError(f"data.datasets.{name}.{split} is {size!r}; it must be a number of rows, or -1 for all")
    return QuestionSource(**entry)
