"""Answers the requests of lmms-eval by the controller, and notes what each took."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from eval_pipeline.adaptive.measure import WARM_UPS
from eval_pipeline.adaptive.source import find_controller
from eval_pipeline.adaptive.subject import load_model
from eval_pipeline.lmms.arguments import Arguments
from eval_pipeline.lmms.log import AnswerLog
from eval_pipeline.lmms.question import Question, Request, question_of
from verl_ext.console import print_line, progress_bar
from verl_ext.controller.inference import AdaptiveAnswer, AdaptiveModel
from verl_ext.controller.space import ConfigurationSpace
from verl_ext.controller.vlm import ControlledModel
from verl_ext.errors import UserError


class Responder:
    """Answers one request after the other within one budget.

    Args:
        model: that answers.
        controlled: how it was asked in the controller's training.
        space: that the controller chooses from.
        budget_ms: milliseconds of an answer.
        log: of the answers.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        controlled: ControlledModel,
        space: ConfigurationSpace,
        budget_ms: float,
        log: AnswerLog,
    ) -> None:
        self._model, self._controlled, self._space = model, controlled, space
        self._budget_ms, self._log = budget_ms, log
        self._is_warm = False
        self._warned: set[str] = set()

    def respond(self, requests: Sequence[Request], documents: Mapping[str, Any]) -> list[str]:
        """The answers in the order of the requests.

        Args:
            requests: of output type `generate_until`.
            documents: by task, split and place.

        Raises:
            UserError: one of them has not one image.
        """
        bar = progress_bar(requests, desc="answering", unit="questions")
        answers = [self._respond(question_of(each, documents, self._controlled.question_suffix)) for each in bar]
        self._log.tell_summary()
        return answers

    def _respond(self, question: Question) -> str:
        self._warn_of_settings(question)
        if not self._is_warm:
            self._warm_up(question)
        answered = self._answer(question)
        answer = question.ended(answered.answer)
        self._log.note(question, answered, answer)
        return answer

    def _answer(self, question: Question) -> AdaptiveAnswer:
        return self._model.answer(question.image, question.text, self._budget_ms)

    def _warm_up(self, question: Question) -> None:
        """Run everything at each tier, so that the first answers are not later than the others."""
        runner, space = self._model.runner, self._space
        for _ in range(WARM_UPS):
            self._answer(question)
            for tier in range(len(space.tiers)):
                seen = runner.encode(question.image, question.text, tier)
                runner.answer(seen, space.configuration(tier, [True] * space.num_blocks))
        self._is_warm = True

    def _warn_of_settings(self, question: Question) -> None:
        """Tell, once for each task, which generation settings it asks for in vain."""
        if question.task in self._warned:
            return
        self._warned.add(question.task)
        kept = {"do_sample": False, "temperature": 0, "num_beams": 1, "max_new_tokens": self._controlled.max_new_tokens}
        others = [
            f"{name}={value}"
            for name, value in question.settings.items()
            if value is not None and (name not in kept or kept[name] != value)
        ]
        if others:
            print_line(
                f"warning: {question.task} asks for {', '.join(others)}; answers are the likeliest ones, of at most "
                f"{self._controlled.max_new_tokens} tokens, as the controller was trained with them"
            )


def load_responder(arguments: Arguments) -> Responder:
    """Load the controller and its model.

    Raises:
        UserError: one cannot be loaded, there are several processes, or the log cannot be written.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("latencies are measured by one process alone; start lmms-eval without accelerate or torchrun")
    source = find_controller(arguments.pretrained)
    trusted, adapter = arguments.trust_remote_code, arguments.adapter
    model, controller, controlled = load_model(
        source, source.config(), arguments.vlm, arguments.device, trusted, adapter
    )
    low, high = controller.config.low_ms, controller.config.high_ms
    if not low <= arguments.budget_ms <= high:
        print_line(
            f"warning: the controller was trained for {low:g} to {high:g} ms, and not for {arguments.budget_ms:g}"
        )
    log = AnswerLog(arguments.log, controller.space, arguments.budget_ms)
    return Responder(model, controlled, controller.space, arguments.budget_ms, log)
