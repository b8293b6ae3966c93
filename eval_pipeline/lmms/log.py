"""What the controller chose for each request and what that took, for a file and in a sentence."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from eval_pipeline.lmms.question import Question
from verl_ext.console import print_line
from verl_ext.controller.inference import AdaptiveAnswer
from verl_ext.controller.space import ConfigurationSpace
from verl_ext.errors import UserError


class AnswerLog:
    """Of one run.

    Args:
        path: of a file that gets a line of JSON for each answer as soon as there is one; None for none.
        space: that the controller chooses from.
        budget_ms: milliseconds of an answer.

    Raises:
        UserError: the file has answers already, or cannot be written.
    """

    def __init__(self, path: Path | None, space: ConfigurationSpace, budget_ms: float) -> None:
        self._space, self._budget_ms = space, budget_ms
        self._totals_ms: list[float] = []
        self._file = None if path is None else _opened(path)

    def note(self, question: Question, answered: AdaptiveAnswer, answer: str) -> None:
        """Keep an answer.

        Args:
            question: that was asked.
            answered: what the model gave.
            answer: what of it goes to the task.
        """
        self._totals_ms.append(answered.total_ms)
        if self._file is None:
            return
        chosen = answered.configuration
        row = {
            **{"task": question.task, "split": question.split, "doc_id": question.doc_id, "answer": answer},
            **{"budget_ms": self._budget_ms, "total_ms": answered.total_ms},
            "is_late": answered.total_ms > self._budget_ms,
            **{"decision_ms": answered.decision_ms, "network_ms": answered.network_ms},
            **asdict(answered.latency),
            "tier": self._space.tiers[chosen.tier],
            **{"blocks": list(map(int, chosen.blocks)), "topk": list(chosen.topk)},
            "complexity": self._space.complexity(chosen),
        }
        print(json.dumps(row), file=self._file, flush=True)

    def tell_summary(self) -> None:
        """Print the mean latency of all answers so far, and how many were late."""
        late = sum(total > self._budget_ms for total in self._totals_ms)
        if count := len(self._totals_ms):
            mean = statistics.fmean(self._totals_ms)
            print_line(
                f"budget_controller: {count} answers, {mean:.1f} ms on average, {late} above {self._budget_ms:g} ms"
            )


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UserError(f"the log {path} cannot be written ({error}); name another one") from error
    if file.tell():  # an empty one is of a run that ended before its first answer
        file.close()
        raise UserError(f"{path} has answers of another run; name another log")
    return file
