"""What the stage budget can refuse before torchrun starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.config.checks import check_ascending, check_choices, check_ranges, check_without_effect, value_of
from verl_ext.errors import UserError
from verl_ext.launch import reward_check
from verl_ext.launch.prepare import is_within
from verl_ext.launch.question_check import OF_TEXTS, check_questions
from verl_ext.plugins import Plugin

CHOICES: dict[str, tuple[str | int | None, ...]] = {
    **reward_check.CHOICES,
    "latency.source": ("model", "measured"),
    "latency.validation": ("same", "measured"),
    "latency.percentile": (50, 75, 90, 95),
    "controller.dtype": ("auto", "bf16", "fp32"),
}
RANGES = {  # lowest and highest value allowed
    **reward_check.RANGES,
    "data.max_unreadable_images": (0, math.inf),
    "actor.tier_entropy_weight": (0, math.inf),
    "rollout.n": (2, math.inf),
    "latency.configurations": (10, math.inf),
    "latency.repeats": (1, math.inf),
    "controller.hidden": (1, math.inf),
    "controller.dropout": (0, 0.99),
    "controller.max_new_tokens": (1, math.inf),
    "controller.most_encodings": (1, math.inf),
    "reward.accuracy": (0, math.inf),
    "reward.latency_penalty": (0, math.inf),
    "reward.budget_violation": (0, math.inf),
    "reward.efficiency": (0, math.inf),
    "reward.complexity": (0, math.inf),
    "optim.plateau_factor": (1e-6, 1 - 1e-6),
    "optim.plateau_patience": (0, math.inf),
}
OF_OTHERS = OF_TEXTS | {  # settings of other stages: the value they must keep in this one
    # the learning rate falls on a plateau
    "optim.lr_scheduler": "constant",
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_warmup_steps": -1,
    "optim.total_training_steps": -1,
    "optim.min_lr_ratio": 0.0,
    "optim.num_cycles": 0.5,
    # what is trained is the controller, which is made here
    "model.attn_implementation": "auto",
    "model.external_lib": None,
    "model.fsdp_config.model_dtype": "fp32",
    "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": None,
    "eval.recipe": None,
}


def check_budget(config: DictConfig) -> None:
    """Refuse settings of this stage that cannot work, whatever model and data they are for.

    Raises:
        UserError: the first of them and how to mend it.
    """
    check_choices(config, CHOICES)
    check_ranges(config, RANGES)
    check_without_effect(config, OF_OTHERS, "on a budget controller")
    check_ascending(config, "controller.tier_sizes")
    check_ascending(config, "controller.topk_choices", may_be_empty=True)
    if config.data.eval_batches == 0:
        raise UserError(
            "data.eval_batches is 0, but in this stage every epoch ends with an evaluation; set it to the number of "
            "batches to evaluate, or to -1 for all of them"
        )
    if config.trainer.test_freq != config.data.eval_every_steps or config.data.eval_every_steps == 0:
        raise UserError(
            "trainer.test_freq is data.eval_every_steps in this stage; set that to steps, or -1 for every epoch's end"
        )
    check_budgets(config)
    is_one_update = config.actor.ppo_mini_batch_size in (None, config.data.train_batch_size)
    if config.controller.dropout and not (is_one_update and config.actor.ppo_epochs == 1):
        raise UserError(
            "with several updates in a step a ratio would tell of dropout before it tells of an update; set "
            "controller.dropout=0, or actor.ppo_epochs=1 with actor.ppo_mini_batch_size=null"
        )
    if config.model.adapter is not None:
        Plugin.parse(config.model.adapter, "model.adapter")


def check_budget_files(config: DictConfig, awaited: Sequence[Path] = ()) -> None:
    """Refuse questions and other files of this stage that cannot be used; `awaited` is that of `check_inputs`.

    Raises:
        UserError: the first of them and how to mend it.
    """
    check_questions(config, ("train", "val"), awaited)
    for key in ("controller.init_from", "controller.importance_file", "latency.file"):
        path = value_of(config, key)
        if path is not None and not is_within(path, awaited) and not Path(path).expanduser().exists():
            raise UserError(f"{key}={path} does not exist; correct the path, or set it to null")


def check_budgets(config: DictConfig) -> None:
    """Milliseconds, and shares where they take their place, are two positive numbers, ascending."""
    units = {"budgets_ms": "numbers of milliseconds", "budgets_of_full": "shares of what all of the model takes"}
    for name, unit in units.items():
        found = value_of(config, f"controller.{name}")
        budgets = [] if found is None else list(found)
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in budgets)
        if found is not None and (len(budgets) != 2 or not are_numbers or not 0 < budgets[0] <= budgets[1] < math.inf):
            raise UserError(f"controller.{name} is {budgets}; it must be two ascending {unit}")
    if config.controller.budgets_of_full is not None and config.latency.source != "model":
        raise UserError(
            "controller.budgets_of_full is a share of what all of the model takes; "
            "set latency.source=model, which says that"
        )
