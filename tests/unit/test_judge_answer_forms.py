r"""Right and wrong forms of an answer, by topic. `x` stands for `\boxed{x}`."""

from __future__ import annotations

import pytest

from eval_pipeline.judge.numeric_answer import is_right

LETTERS_AND_WORDS = [
    (r"\frac{m}{M}", (r"\frac{m}{M}",), (r"\frac{M}{m}", r"\frac mm")),
    ("R-r", ("-r+R",), ("r-R",)),
    (r"\Delta", (r"\Delta",), (r"\delta",)),
    ("M", ("M",), ("m",)),
    ("mg", (r"g \cdot m",), ("Mg", "mG")),
    ("2AE", ("2EA",), ("2ae",)),
    ("Paris", ("paris", "PARIS", r"\text{paris.}"), ("London",)),
    ("Rule 110 Holds", (r"\text{rule 110 holds}",), ("rule 110 fails",)),
    ("\u00c9cole", ("\u00e9cole",), ("ecole",)),
    ("No", ("no", "NO"), ("on",)),
    ("B", ("b", "(b)", "<answer>b.</answer>"), ("a", "(a)")),
    ("2A_{16}", ("2a", "2a_{16}", r"\text{2A}_{16}", "(2A)_{16}"), ("2B", "2A_{17}")),
    ("x^2+C", ("x^2+c", "x^2+k", r"x^2+\text{constant}", "x^2 + C_1", "y = x^2 + K"), ("x^2+x", "x^2-C", "kx^2+k")),
    ("A+B+C", ("A+C+B",), ("A+B+D",)),
]


@pytest.mark.parametrize(("reference", "right", "wrong"), [*LETTERS_AND_WORDS])
def test_accepts_exactly_right_forms(reference: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    accepted = [answer for answer in (*right, *wrong) if is_right(_tagged(answer), reference)]
    assert accepted == [*right]


def _tagged(answer: str) -> str:
    is_tagged = any(tag in answer.lower() for tag in ("answer", "####", "box", "choose", "solution is"))
    return answer if is_tagged else rf"So it is $\boxed{{{answer}}}$."
