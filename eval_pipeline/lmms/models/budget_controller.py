"""The model class; the only module of the product that imports lmms-eval."""

from __future__ import annotations

from typing import Any, NoReturn

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from eval_pipeline.lmms.arguments import Arguments
from eval_pipeline.lmms.responder import Responder, load_responder
from verl_ext.errors import UserError


class BudgetControllerModel(lmms):
    """`--model budget_controller`: each request by as much of the model as the controller grants it.

    Args:
        arguments: what `--model_args` says, see `Arguments`, beside what lmms-eval adds.

    Raises:
        UserError: an argument is bad, or the controller or its model cannot be loaded.
    """

    is_simple = True
    """Requests have a text and visuals, not messages."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._responder: Responder = load_responder(Arguments.of(arguments))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in the order of the requests."""
        return self._responder.respond(requests, self.task_dict)

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refused.

        Raises:
            UserError: always.
        """
        raise UserError(
            "budget_controller writes answers and gives no likelihoods, which tasks of output_type loglikelihood and "
            "multiple_choice need; choose tasks of output_type generate_until"
        )

    def generate_until_multi_round(self, requests: list[Instance]) -> NoReturn:
        """Refused.

        Raises:
            UserError: always.
        """
        raise UserError(
            "budget_controller answers one question about one image; choose tasks of output_type generate_until, not "
            "generate_until_multi_round"
        )
