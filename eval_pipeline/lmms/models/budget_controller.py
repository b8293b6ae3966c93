"""The model class for lmms-eval. Only this module imports lmms-eval."""

from __future__ import annotations

from typing import Any, NoReturn

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from verl_ext.controller.evaluation.lmms import LmmsModelArgs, LmmsResponder
from verl_ext.errors import UserError


class BudgetControllerModel(lmms):
    """`--model budget_controller`: answers each request with the part of the model that the controller chooses.

    Args:
        arguments: `--model_args` (see `LmmsModelArgs`), and arguments that lmms-eval adds.

    Raises:
        UserError: an argument is invalid, or the controller or its model cannot be loaded.
    """

    is_simple = True
    """Requests have a text and visuals instead of messages."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._responder = LmmsResponder(LmmsModelArgs.parse(arguments))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in the order of the requests."""
        return self._responder.respond(requests, self.task_dict)

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refused with a `UserError`."""
        raise UserError(
            "budget_controller generates text and returns no likelihoods, which tasks of output_type loglikelihood and "
            "multiple_choice need; choose tasks of output_type generate_until"
        )

    def generate_until_multi_round(self, requests: list[Instance]) -> NoReturn:
        """Refused with a `UserError`."""
        raise UserError(
            "budget_controller answers one question about one image; choose tasks of output_type generate_until, not "
            "generate_until_multi_round"
        )
