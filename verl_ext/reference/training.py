"""The keys of the training stages, each with what the code says of it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl_ext.config import checks
from verl_ext.config.compose import LAYERS, base_config, load_yaml
from verl_ext.config.overrides import leaves
from verl_ext.config.plain import as_dict
from verl_ext.health.limits import Limits
from verl_ext.launch import budget_check, grpo_check, question_check, sft_check, vlm_check
from verl_ext.reference.comments import comments_of
from verl_ext.reference.entry import Entry, kind_of, shown

STAGES = tuple(LAYERS)
CONFIG = Path(checks.__file__).parent
LIMITS = "health.limits."
OF_ALL = {key: value for key, (value, _) in checks.WITHOUT_EFFECT.items()}
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "sft": OF_ALL,
    "grpo": OF_ALL | grpo_check.OF_CHATS,
    "budget": OF_ALL | budget_check.OF_OTHERS,
    "vlm_sft": OF_ALL | question_check.OF_TEXTS,
}
"""By stage: keys of others, and the value that they must keep."""
CHOICES: dict[str, dict[str, Any]] = {
    "sft": {**checks.CHOICES, **checks.GATHERING, **sft_check.PACKING},
    "grpo": {**checks.CHOICES, **grpo_check.CHOICES},
    "budget": {**checks.CHOICES, **budget_check.CHOICES},
    "vlm_sft": {**checks.CHOICES, **checks.GATHERING},
}
COUNTS = dict.fromkeys((*checks.AT_LEAST_ONE, *vlm_check.AT_LEAST_ONE), (1, math.inf))
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "sft": COUNTS | checks.RANGES,
    "grpo": COUNTS | checks.RANGES | grpo_check.RANGES,
    "budget": COUNTS | checks.RANGES | budget_check.RANGES,
    "vlm_sft": COUNTS | checks.RANGES | vlm_check.RANGES,
}
COUNTS_OR_NULL = (*checks.NULL_OR_AT_LEAST_ONE, *sft_check.NULL_OR_AT_LEAST_ONE)
KINDS_OF_NULL = {  # of keys whose default says nothing, and of those that take more than it shows
    "actor.loss_scale_factor": "number or null",
    "actor.ppo_mini_batch_size": "whole number or null",
    "controller.budgets_of_full": "list of two numbers, or null",
    "controller.importance_file": "path or null",
    "controller.init_from": "path or null",
    "data.chat_template": "path, text or null",
    "data.custom_cls.name": "text or null",
    "data.custom_cls.path": "path or null",
    "data.prompt_dict_keys": "list or null",
    "data.response_dict_keys": "list or null",
    "data.token_cache": "path or null",
    "data.train_files": "path or list",
    "data.val_files": "path, list or null",
    "eval.devices": "number, text, list or null",
    "eval.recipe": "text or null",
    "latency.file": "path or null",
    "model.adapter": "text or null",
    "model.external_lib": "text or null",
    "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": "text, list or null",
    "model.lora_adapter_path": "path or null",
    "model.partial_pretrain": "text",
    "model.sft_run": "path or null",
    "model.target_modules": "text or list",
    "optim.override_optimizer_config": "mapping or null",
    "recipe": "text",
    "reward.num_workers": "whole number or null",
    "trainer.preemption.deadline": "number, text or null",
    "trainer.resume_from_path": "path or null",
}


def entries_of(stage: str) -> dict[str, Entry]:
    """By key what there is to say of it in a stage, those left out that have no effect there.

    Raises:
        KeyError: a key has no sentence, or no kind.
    """
    config = base_config(stage)
    resolved, sentences = as_dict(config), sentences_of(stage)
    return {
        key: Entry(key, _kind(key, stage, checks.value_of(resolved, key)), _default(key, default), sentences[key])
        for key, default in leaves(config).items()
        if key not in WITHOUT_EFFECT[stage]
    }


@cache
def sentences_of(stage: str) -> Mapping[str, str]:
    """By key the sentence of the last file that has one."""
    found = leaves(load_yaml(Path(__file__).with_name("verls_keys.yaml")))
    for name in LAYERS[stage]:
        found |= comments_of(CONFIG / f"{name}.yaml")
    del found[LIMITS.rstrip(".")]  # each of them has a sentence of its own
    found["stage"] = comments_of(CONFIG / "common.yaml")["stage"]
    attributes = re.findall(r"^\s+(\w+): (.+)$", inspect.getdoc(Limits) or "", re.MULTILINE)
    return found | {f"{LIMITS}{name}": sentence.rstrip(".") for name, sentence in attributes}


def _kind(key: str, stage: str, value: Any) -> str:
    if key in COUNTS_OR_NULL:
        return "whole number, at least 1, or null"
    if key in KINDS_OF_NULL:
        return KINDS_OF_NULL[key]
    choices = (LAYERS if key == "stage" else CHOICES[stage].get(key)) or None
    if value is None and choices is None:
        raise KeyError(key)
    return kind_of(value, list(choices) if choices else None, RANGES[stage].get(key))


def _default(key: str, value: Any) -> str:
    return "the command's first" if key == "stage" else shown(value)
