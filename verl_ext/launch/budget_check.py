"""Files of a run of the budget controller, checked before torchrun starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_ext.errors import UserError
from verl_ext.launch.prepare import is_within
from verl_ext.launch.question_check import check_questions
from verl_ext.trainer.stages import BudgetConfig


def check_budget_files(config: BudgetConfig, awaited: Sequence[Path] = ()) -> None:
    """Refuse questions and other files of this stage that cannot be used; `awaited` is that of `check_inputs`.

    Raises:
        UserError: the first of them and how to mend it.
    """
    check_questions(config, ("train", "val"), awaited)
    named = {
        "controller.init_from": config.controller.init_from,
        "controller.importance_file": config.controller.importance_file,
        "latency.file": config.latency.file,
    }
    for key, path in named.items():
        if path is not None and not is_within(path, awaited) and not Path(path).expanduser().exists():
            raise UserError(f"{key}={path} does not exist; correct the path, or set it to null")
