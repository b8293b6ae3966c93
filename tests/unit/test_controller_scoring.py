"""VQA soft accuracy, on examples computed by hand and checked against the official code."""

from __future__ import annotations

import pytest
from pycocoevalcap.cider.cider_scorer import CiderScorer

from verl_ext.controller.scoring import AnswerScorer, CaptionScorer, caption_words, normalize_answer, soft_accuracy
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, metric_of


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("Yes.", "yes"),
        ("The  Red\nCar", "red car"),
        ("two dogs", "2 dogs"),
        ("none", "0"),
        ("dont know", "don't know"),
        ("couldn'tve", "couldn't've"),
        ("its", "its"),
        ("shes", "shes"),
        ("somebody'd", "somebodyd"),
        ("1,000", "1000"),
        ("1,000-2,000 a-b", "10002000 ab"),
        ("a-b", "b"),
        ("x-y", "x y"),
        ("x - y", "x y"),
        ("what?", "what"),
        ("3.5", "3.5"),
        ("no. 5", "no 5"),
        ("$1.00", "$1.00"),
        ("", ""),
    ],
)
def test_answer_normalization_equals_official_evaluation(answer: str, wanted: str) -> None:
    assert normalize_answer(answer) == wanted


@pytest.mark.parametrize(
    ("answer", "references", "wanted"),
    [
        ("yes", ["yes"] * 10, 1.0),
        ("Yes.", ["yes"] * 10, 1.0),
        ("no", ["yes"] * 10, 0.0),
        # one annotator agrees with no other; for the other nine, one of three is matched
        ("no", ["no"] + ["yes"] * 9, 0.3),
        ("no", ["no"] * 2 + ["yes"] * 8, 0.6),
        ("no", ["no"] * 3 + ["yes"] * 7, 0.9),
        ("no", ["no"] * 4 + ["yes"] * 6, 1.0),
        ("2", ["two", "Two", "2", "the 2"] + ["three"] * 6, 1.0),
        ("red", ["Red"], 1.0),
        ("red", ["blue", "red", "green"], 1.0),
        ("grey", ["blue", "red", "green"], 0.0),
    ],
)
def test_soft_accuracy_equals_hand_computation(answer: str, references: list[str], wanted: float) -> None:
    assert soft_accuracy(answer, references) == pytest.approx(wanted)


def test_missing_references_are_rejected() -> None:
    with pytest.raises(ValueError, match="without references"):
        soft_accuracy("yes", [])


CAPTIONS = [
    ["A cat sits on a mat.", "a grey cat on the mat"],
    ["Two dogs run over the grass.", "dogs are running in a park"],
    ["A red bus in a street.", "the bus is red"],
    ["A man rides a horse.", "someone on a brown horse"],
]


def test_single_caption_scores_as_within_corpus() -> None:
    answers = ["a cat on a mat", "dogs run in the grass", "a blue car", "A man rides a horse."]
    library = CiderScorer()
    for answer, references in zip(answers, CAPTIONS):
        library += (caption_words(answer), [caption_words(each) for each in references])
    _, wanted = library.compute_score()
    scorer = CaptionScorer(CAPTIONS)
    assert [scorer.cider(answer, references) for answer, references in zip(answers, CAPTIONS)] == pytest.approx(wanted)
    assert wanted[3] > wanted[2] and scorer.accuracy(answers[3], CAPTIONS[3]) == 1.0
    assert scorer.accuracy("", CAPTIONS[0]) == 0.0


def test_question_is_scored_by_metric_of_its_dataset() -> None:
    asked = [
        ImageQuestion(f"coco_caption/{n}", b"", "?", tuple(references), "cider")
        for n, references in enumerate(CAPTIONS)
    ]
    scorer = AnswerScorer(asked)
    assert scorer(asked[3], "a man rides a horse") == 1.0 > scorer(asked[3], "a red bicycle")
    assert scorer(ImageQuestion("mine/1", b"", "?", ("two",)), "2") == 1.0
    source = QuestionSource()
    assert [metric_of(name, source) for name in ("coco_caption", "text_vqa", "mine")] == ["cider", "vqa", "vqa"]
    assert metric_of("mine", QuestionSource(metric="cider")) == "cider"
