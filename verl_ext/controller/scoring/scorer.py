"""How right an answer is, by the metric of the data set that its question is of."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ext.controller.scoring.vqa import soft_accuracy
from verl_ext.data.image_questions import ImageQuestion


class AnswerScorer:
    """VQA soft accuracy or CIDEr, from 0 to 1.

    Args:
        questions: that answers may be of; captions are compared by the words of all of them.
    """

    def __init__(self, questions: Sequence[ImageQuestion]) -> None:
        captions = [question.references for question in questions if question.metric == "cider"]
        if captions:  # the library is not needed for anything else
            from verl_ext.controller.scoring.cider import CaptionScorer

            self._captions = CaptionScorer(captions)

    def __call__(self, question: ImageQuestion, answer: str) -> float:
        """The accuracy of an answer."""
        if question.metric == "cider":
            return self._captions.accuracy(answer, question.references)
        return soft_accuracy(answer, question.references)
