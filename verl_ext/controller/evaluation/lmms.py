"""Answers the requests of lmms-eval with a controller and logs the latency of each answer; needs no lmms-eval."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from PIL import Image

from verl_ext.console import print_line, progress_bar, warn
from verl_ext.controller.execution import NUM_WARM_UPS
from verl_ext.controller.inference import AdaptiveAnswer, load_adaptive_model
from verl_ext.controller.source import find_controller
from verl_ext.errors import UserError
from verl_ext.files import LineWriter
from verl_ext.plugins import Plugin

BATCH_SIZES = ("batch_size", "max_batch_size")
"""Arguments added by lmms-eval."""
IMAGE_PLACEHOLDER = "<image>"
"""Position of the image in a task's text; the model's own chat template puts the image first."""


@dataclass(frozen=True)
class LmmsModelArgs:
    """`--model_args` of the model `budget_controller`, see docs/guides/lmms_eval.md, and `--device`."""

    pretrained: Path
    budget_ms: float
    vlm: str | None = None
    log: Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    adapter: Plugin | None = None

    @classmethod
    def parse(cls, words: Mapping[str, Any]) -> LmmsModelArgs:
        """Read the arguments from lmms-eval, which has already converted numbers.

        Raises:
            UserError: an argument is missing, unknown or invalid.
        """
        given = dict(words)
        if any(str(given.pop(name, 1)) != "1" for name in BATCH_SIZES):
            raise UserError("a latency budget applies to a single question; set --batch_size to 1")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise UserError(f"budget_controller has no argument {', '.join(unknown)}; it has {', '.join(known)}")
        if missing := [name for name in ("pretrained", "budget_ms") if name not in given]:
            raise UserError(f"budget_controller needs {' and '.join(missing)}; set them in --model_args")
        budget_ms = given["budget_ms"]
        if isinstance(budget_ms, bool) or not isinstance(budget_ms, int | float) or not 0 < budget_ms < math.inf:
            raise UserError(f"budget_ms={budget_ms} must be a number of milliseconds above 0")
        given["budget_ms"] = float(budget_ms)
        given |= {name: Path(str(given[name])).expanduser() for name in ("pretrained", "log") if name in given}
        given |= {name: str(given[name]) for name in ("vlm", "device") if name in given}
        if not isinstance(given.get("trust_remote_code", False), bool):
            raise UserError(f"trust_remote_code={given['trust_remote_code']} must be True or False")
        if "adapter" in given:
            given["adapter"] = Plugin.parse(str(given["adapter"]), "adapter")
        return cls(**given)


@dataclass(frozen=True)
class LmmsQuestion:
    """A request with one question about one image.

    Attributes:
        doc_id: index into the split of the task's dataset.
        image: RGB image.
        text: full text of the question.
        until: strings; the answer ends before the first of them.
        settings: other generation settings of the task.
    """

    task: str
    split: str
    doc_id: int
    image: Image.Image
    text: str
    until: tuple[str, ...]
    settings: Mapping[str, Any]

    @classmethod
    def from_request(cls, request: Any, documents: Mapping[str, Any], suffix: str) -> LmmsQuestion:
        """Read a request.

        Args:
            request: an lmms-eval `Instance` with output type `generate_until`.
            documents: documents by task, split and index.
            suffix: suffix of every question in the controller's training; not appended twice.

        Raises:
            UserError: the request does not have exactly one image.
        """
        text, settings, load_visuals, doc_id, task, split = request.args
        image = _only_image(load_visuals(documents[task][split][doc_id]), f"document {doc_id} of {task}")
        text = text.replace(IMAGE_PLACEHOLDER, "").strip()
        until = settings.get("until") or ()
        ends = (until,) if isinstance(until, str) else tuple(until)
        others = {name: value for name, value in settings.items() if name != "until"}
        full_text = text if text.endswith(suffix.strip()) else text + suffix
        return cls(task, split, doc_id, image, full_text, tuple(filter(None, ends)), others)

    def truncate(self, answer: str) -> str:
        """Truncate an answer before the first string in `until`."""
        for end in self.until:
            answer = answer.split(end, 1)[0]
        return answer.strip()


def _only_image(visuals: Any, name: str) -> Image.Image:
    images = list(visuals or ())
    if len(images) != 1 or not isinstance(images[0], Image.Image):
        kinds = ", ".join(type(each).__name__ for each in images) or "none"
        raise UserError(
            f"{name} has {len(images)} visuals ({kinds}), but budget_controller answers questions about a single "
            "image; choose another task"
        )
    return images[0]


class LmmsResponder:
    """Answers requests one at a time within a budget, and logs the configuration and the latency of each answer.

    Raises:
        UserError: the controller or its model cannot be loaded, there are several processes, or the log already has
            answers or cannot be written.
    """

    def __init__(self, arguments: LmmsModelArgs) -> None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError("latency measurements need a single process; run lmms-eval without accelerate or torchrun")
        self._budget_ms = budget_ms = arguments.budget_ms
        self._model, self._controlled = load_adaptive_model(
            find_controller(arguments.pretrained),
            arguments.vlm,
            arguments.device,
            arguments.trust_remote_code,
            arguments.adapter,
        )
        low, high = self._model.trained_ms
        if not low <= budget_ms <= high:
            warn(f"the controller was trained for {low:g} to {high:g} ms, not for {budget_ms:g}")
        self._log = None if arguments.log is None else _open_log(arguments.log)
        self._totals_ms: list[float] = []
        self._is_warm = False
        self._warned_tasks: set[str] = set()

    def respond(self, requests: Sequence[Any], documents: Mapping[str, Any]) -> list[str]:
        """Answer requests in order, and print the mean latency and the number of answers that exceed the budget.

        Args:
            requests: see `LmmsQuestion.from_request`, also for `documents`.

        Raises:
            UserError: a request does not have exactly one image.
        """
        suffix = self._controlled.question_suffix
        bar = progress_bar(requests, desc="answering", unit="questions")
        answers = [self._respond(LmmsQuestion.from_request(each, documents, suffix)) for each in bar]
        if count := len(self._totals_ms):
            mean, late = statistics.fmean(self._totals_ms), sum(total > self._budget_ms for total in self._totals_ms)
            print_line(
                f"budget_controller: {count} answers, {mean:.1f} ms on average, {late} above {self._budget_ms:g} ms"
            )
        return answers

    def _respond(self, question: LmmsQuestion) -> str:
        self._warn_of_ignored_settings(question)
        if not self._is_warm:
            for _ in range(NUM_WARM_UPS):
                self._answer(question)
                self._model.runner.warm_up(question.image, question.text, self._model.space)
            self._is_warm = True
        adaptive = self._answer(question)
        answer = question.truncate(adaptive.answer)
        self._totals_ms.append(adaptive.total_ms)
        if self._log is not None:
            self._log.write(json.dumps(self._log_row(question, adaptive, answer)))
        return answer

    def _answer(self, question: LmmsQuestion) -> AdaptiveAnswer:
        return self._model.answer(question.image, question.text, self._budget_ms)

    def _log_row(self, question: LmmsQuestion, adaptive: AdaptiveAnswer, answer: str) -> dict[str, Any]:
        """A line of the log; `answer` is the truncated answer that the task receives."""
        configuration, space = adaptive.configuration, self._model.space
        return {
            "task": question.task,
            "split": question.split,
            "doc_id": question.doc_id,
            "answer": answer,
            "budget_ms": self._budget_ms,
            "total_ms": adaptive.total_ms,
            "is_late": adaptive.total_ms > self._budget_ms,
            "decision_ms": adaptive.decision_ms,
            "network_ms": adaptive.network_ms,
            **asdict(adaptive.latency),
            "tier": space.tiers[configuration.tier],
            "blocks": list(map(int, configuration.blocks)),
            "topk": list(configuration.topk),
            "complexity": space.complexity(configuration),
        }

    def _warn_of_ignored_settings(self, question: LmmsQuestion) -> None:
        """Warn once per task about generation settings without effect."""
        if question.task in self._warned_tasks:
            return
        self._warned_tasks.add(question.task)
        max_new_tokens = self._controlled.max_new_tokens
        fulfilled = {"do_sample": False, "temperature": 0, "num_beams": 1, "max_new_tokens": max_new_tokens}
        ignored = [
            f"{name}={value}"
            for name, value in question.settings.items()
            if value is not None and (name not in fulfilled or fulfilled[name] != value)
        ]
        if ignored:
            warn(
                f"{question.task} sets {', '.join(ignored)}, which has no effect; decoding is greedy, with at most "
                f"{max_new_tokens} tokens, as in the controller's training"
            )


def _open_log(path: Path) -> LineWriter:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = LineWriter(path)
    except OSError as error:
        raise UserError(f"the log {path} cannot be written ({error}); specify another one") from error
    if path.stat().st_size:  # an empty file is left by a run that ended before its first answer
        log.close()
        raise UserError(f"{path} has answers of another run; specify another log")
    return log
