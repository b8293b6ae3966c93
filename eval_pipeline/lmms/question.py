"""What a request of lmms-eval asks: one question about one image, and how its answer is to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from verl_ext.errors import UserError

PLACEHOLDER = "<image>"
"""Where a task's text has the image; the model's own chat template puts it in front."""


class Request(Protocol):
    """What is used of `lmms_eval.api.instance.Instance`."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Text, generation settings, function from document to visuals, number of the document, task, split."""


@dataclass(frozen=True)
class Question:
    """A request.

    Attributes:
        task: its name.
        split: of the task's data set.
        doc_id: place in the split.
        image: in RGB.
        text: as the model is asked.
        until: the answer ends before the first of these.
        settings: all others of the task's generation settings.
    """

    task: str
    split: str
    doc_id: int
    image: Image.Image
    text: str
    until: tuple[str, ...]
    settings: Mapping[str, Any]

    def ended(self, answer: str) -> str:
        """An answer up to where it is to end."""
        for end in self.until:
            answer = answer.split(end, 1)[0]
        return answer.strip()


def question_of(request: Request, documents: Mapping[str, Any], suffix: str) -> Question:
    """Read a request.

    Args:
        request: of output type `generate_until`.
        documents: by task, split and place.
        suffix: what the controller was trained to see behind every question; it is not put behind it twice.

    Raises:
        UserError: it has not one image.
    """
    text, settings, visuals_of, doc_id, task, split = request.args
    image = _only_image(visuals_of(documents[task][split][doc_id]), f"document {doc_id} of {task}")
    text = text.replace(PLACEHOLDER, "").strip()
    until = settings.get("until") or ()
    ends = (until,) if isinstance(until, str) else tuple(until)
    others = {name: value for name, value in settings.items() if name != "until"}
    asked = text if text.endswith(suffix.strip()) else text + suffix
    return Question(task, split, doc_id, image, asked, tuple(filter(None, ends)), others)


def _only_image(visuals: Any, name: str) -> Image.Image:
    found = list(visuals or ())
    if len(found) != 1 or not isinstance(found[0], Image.Image):
        kinds = ", ".join(type(each).__name__ for each in found) or "none"
        raise UserError(
            f"{name} has {len(found)} visuals ({kinds}), and budget_controller answers questions about one image each; "
            "choose another task"
        )
    return found[0].convert("RGB")
