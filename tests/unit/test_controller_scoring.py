"""VQA soft accuracy by examples that were worked out by hand and checked against the official code."""

from __future__ import annotations

import pytest

from verl_ext.controller.scoring.vqa import normalise, soft_accuracy


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
def test_answers_are_compared_as_the_official_evaluation_does(answer: str, wanted: str) -> None:
    assert normalise(answer) == wanted


@pytest.mark.parametrize(
    ("answer", "references", "wanted"),
    [
        ("yes", ["yes"] * 10, 1.0),
        ("Yes.", ["yes"] * 10, 1.0),
        ("no", ["yes"] * 10, 0.0),
        ("no", ["no"] + ["yes"] * 9, 0.3),  # one of them sees no other, nine see one of three
        ("no", ["no"] * 2 + ["yes"] * 8, 0.6),
        ("no", ["no"] * 3 + ["yes"] * 7, 0.9),
        ("no", ["no"] * 4 + ["yes"] * 6, 1.0),
        ("2", ["two", "Two", "2", "the 2"] + ["three"] * 6, 1.0),
        ("red", ["Red"], 1.0),
        ("red", ["blue", "red", "green"], 1.0),
        ("grey", ["blue", "red", "green"], 0.0),
    ],
)
def test_soft_accuracy(answer: str, references: list[str], wanted: float) -> None:
    assert soft_accuracy(answer, references) == pytest.approx(wanted)


def test_no_references_are_refused() -> None:
    with pytest.raises(ValueError, match="without references"):
        soft_accuracy("yes", [])
