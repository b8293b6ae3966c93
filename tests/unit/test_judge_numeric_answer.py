"""Which number of an answer counts, and when it equals the reference."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eval_pipeline.judge.numeric_answer import is_right
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        # where the answer stands
        ("6 * 7 makes it.\n#### 42", "42"),
        ("####42<|im_end|>", "42"),
        ("<think>41?</think><answer>42</answer>", "42"),
        ("<answer>41</answer> no <Answer>\n42 dollars\n</ANSWER> or 43", "42"),
        ("<answer>42", "42"),
        (r"$$\boxed{42}$$ as 3 others", "42"),
        (r"<answer>\boxed{42} of 50</answer>", "42"),
        (r"\boxed{42\text{ dollars}}", "42"),
        (r"\boxed{\boxed{42}", "42"),
        ("The answer is 42 because 6 of 7 are 43.", "42"),
        ("**Answer:** 42 apples", "42"),
        ("The answer is:\n\n42", "42"),
        ("The answer is 6*7 = 42 apples", "42"),
        ("The answer is as follows. 3 and 4 make 7", "7"),
        ("#### 42\n#### Step 2: check\n#### 3. Done", "42"),
        ("#### Answer: 42\nsince 3 are left", "42"),
        ("<answer>6 * 7 = 42</answer>", "42"),
        ("First 41, then 42.", "42"),
        ("so...42", "42"),
        ("<answer>3 boxes and 39 more are 42</answer>", "42"),
        ("#### 42 (6 a day)", "42"),
        # an equation in the sentence
        ("The answer is 40% of 50 = 20.", "20"),
        ("So the answer is 30 minutes * 60 = 1800 seconds", "1800"),
        ("#### 12 boxes of 6 = 72", "72"),
        ("The answer is 40% of 50 = 20. Check: 20 / 50 = 0.4", "20"),
        ("The answer is 20, as 20 / 50 = 0.4", "20"),
        ("The answer is 20 because 40% of 50 = 19.99 or so", "20"),
        ("The answer is 20 (20 / 50 = 0.4)", "20"),
        ("The answer is 3 * (4 + 10) = 42", "42"),
        ("The answer is x = 1,800 km", "1800"),
        # how it is written
        (r"\boxed{11 \, \text{cm}^2}", "11"),
        (r"\boxed{11\ \mathrm{~m}^{3}}", "11"),
        ("The answer is 11 cm^2", "11"),
        ("#### 1.5 million", "1500000"),
        (r"\boxed{1.5 \text{ million}}", "1,500,000"),
        ("They sold 2 Thousand dollars", "2000"),
        ("The answer is 3 million", "3"),
        ("$1,234.50", "1234.5"),
        (r"\$1{,}234 and nothing", "1,234"),
        (r"1\,234", "1234"),
        ("\u22125", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("10-5", "5"),
        ("50%", "50"),
        (r"50\%", "50%"),
        ("42.", "42"),
        ("42.00", "42"),
        (".5", "1/2"),
        ("42km", "42"),
        ("US$42", "42"),
        ("3/4", "0.75"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\dfrac34", "0.75"),
        ("1 1/2 cups", "1.5"),
        ("4.2e1", "42"),
        ("4.2 \u00d7 10^1", "42"),
        (r"4.2 \times 10^{1}", "42"),
        ("it is **42**", "42"),
        (r"\(42\)", "42"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        (r"#### -\frac12", "-0.5"),
        (r"\boxed{1 \frac{1}{2}}", "1.5"),
        (r"\boxed{-1\tfrac{1}{2}}", "-1.5"),
        (r"\boxed{-\text{5}}", "-5"),
        ("#### 4 - 9 = - 5", "-5"),
        ("The answer isn't 5. It is 42", "42"),
        ("The answer is not 5 but 42", "42"),
        ("\u00bd", "1/2"),
        ("It takes 2\u00bd hours", "2.5"),
        ("\\boxed{-\u00be}", "-0.75"),
        ("#### 3 1\u20442", "3.5"),
        ("#### 5 000", "5000"),
        (r"\boxed{1 234 567}", "1,234,567"),
        ("The answer is 12\u202f345.6 km.", "12345.6"),
        ("#### - 5", "-5"),
        ("#### - $5", "-5"),
        ("<answer>- 5</answer>", "-5"),
        ("The answer is - 5.", "-5"),
        ("**Answer:** \u2212 5", "-5"),
        ("The answer should be 42. Not 4", "42"),
        (r"\boxed{\displaystyle 42 \quad \text{apples}}", "42"),
        ("Answer - 42", "42"),
        ("**Answer \u2013 42**", "42"),
        ("<answer>=> 42</answer>", "42"),
        ("<answer>x -> 42</answer>", "42"),
        ("<answer>0.5 or 1/2</answer>", "1/2"),
        (r"\boxed{2.5 \text{ or } \frac{5}{2}}", "2.5"),
        # units, markup and prose are not algebra
        (r"\boxed{5 m}", "5"),
        ("<answer>42 km/h</answer>", "42"),
        ("<answer><b>42</b></answer>", "42"),
        ("<answer>42</s>", "42"),
        ("<answer>On day 2, 42 apples</answer>", "42"),
        ("<answer>3, 4 and 35 make 42</answer>", "42"),
        (r"\boxed{f(x) = 42}", "42"),
        # left to math_verify
        ("<answer>6*7</answer>", "42"),
        (r"\boxed{2\sqrt{441}}", "42"),
        ("The answer is 2^3", "8"),
        (r"\boxed{-(5)}", "-5"),
        (r"\boxed{\frac{1}{2} - \frac{1}{3}}", "1/6"),
        (r"\boxed{\{\frac12, -1\}}", r"\{-1, 0.5\}"),
        (r"\boxed{\left\{3,1,2\right\}}", r"\{1,2,3\}"),
        (r"\boxed{\frac{\pi}{2}}", r"\pi/2"),
        # a reference that is no number
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        ("<answer>Paris</answer>", "paris"),
        (r"\boxed{x^2+1}", "x^2 + 1"),
        (r"\boxed{\left(-\infty, 3\right)}", r"(-\infty,3)"),
        (r"\boxed{x = 5}", "x=5"),
        (r"\boxed{\text{(B)}}", "B"),
        ("<answer>C</answer>", "(C)"),
        # reasoning
        (r"<think>\boxed{41}?</think> The answer is 42.", "42"),
        ("<think>#### 41</think>\n42 apples", "42"),
        ("<think>#### 42</think>\nThat is it.", "42"),
        ("<think>#### 42", "42"),
    ],
)
def test_accepts_right_answer(answer: str, reference: str) -> None:
    assert is_right(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("", "42"),
        ("forty-two", "42"),
        ("<answer>forty-two</answer> 42", "42"),
        ("<answer></answer> 42", "42"),
        ("<answer>41</answer> #### 42", "42"),
        (r"\boxed{41} The answer is 42", "42"),
        ("#### 41. The answer is 42", "41.5"),
        ("142", "42"),
        ("4 2", "42"),
        ("42.1", "42"),
        ("-42", "42"),
        ("10\u00b2", "102"),
        ("The answer is 40% of 50 = 20", "40"),
        ("The answer is 20. Check: 20 / 50 = 0.4", "0.4"),
        ("3 millionaires", "3000000"),
        (r"\boxed{11^2}", "11"),
        ("0.333", "1/3"),
        ("1 3/4", "3/4"),
        ("3/0", "3"),
        ("a42", "42"),
        ("<answer>6*8</answer>", "42"),
        ("<answer>Rome</answer>", "Paris"),
        (r"\boxed{-\frac{1}{2}}", "1/2"),
        (r"\boxed{-(5)}", "5"),
        ("Left over:\n- 5 apples", "-5"),
        (r"\boxed{1 2, 3}", "12, 3"),
        (r"\boxed{x = 1 or x = 2}", "x = 3 or x = 2"),
        ("Paris", "Rome"),
        ("2\u00bd", "2"),
        ("#### 5 000", "5"),
        ("#### 5 0000", "50000"),
        ("#### 1.5 000", "1500"),
        (r"\boxed{12 34}", "1234"),
        (r"\boxed{1 234 5}", "12345"),
        ("#### - 5", "5"),
        ("<answer>- 5</answer>", "5"),
        ("Answer:\n- 5 apples", "-5"),
        # several numbers
        (r"\boxed{3, 4}", "4"),
        (r"\boxed{(3, 4)}", "4"),
        (r"\boxed{\{3,4\}}", "4"),
        (r"\boxed{[3,4]}", "4"),
        (r"\boxed{3 \text{ or } 4}", "4"),
        (r"\boxed{3 \text{ to } 4 \text{ km}}", "4"),
        (r"\boxed{x = 3, y = 4}", "4"),
        ("<answer>x=3 or x=4</answer>", "4"),
        ("<answer>10:30</answer>", "30"),
        (r"\boxed{\{1,3\}}", r"\{1,2\}"),
        (r"\boxed{\{1,2,3\}}", r"\{1,2\}"),
        (r"\boxed{(2,1)}", r"\{1,2\}"),
        (r"\boxed{\{2,1\}}", "(1,2)"),
        # algebra
        (r"\boxed{5x}", "5"),
        (r"\boxed{x + 5}", "5"),
        (r"\boxed{2n+1}", "1"),
        (r"\boxed{5/x}", "5"),
        (r"\boxed{x/5}", "5"),
        (r"\boxed{3 + 4i}", "4"),
        (r"\boxed{x > 5}", "5"),
        (r"\boxed{3<x<5}", "5"),
        ("\\boxed{x \u2265 5}", "5"),
        ("<answer>\u00b15</answer>", "5"),
        ("<answer>5\u00b2</answer>", "5"),
        (r"\boxed{2**5}", "5"),
        (r"\boxed{5_6}", "5"),
        (r"\boxed{C(7,5)}", "5"),
        (r"\boxed{\text{(B)}}", "C"),
        # reasoning
        (r"<think>\boxed{42}?</think> The answer is 41.", "42"),
        ("<think><answer>42</answer></think>\n#### 41", "42"),
    ],
)
def test_rejects_wrong_answer(answer: str, reference: str) -> None:
    assert not is_right(answer, reference)


N = 200_000


@pytest.mark.parametrize(
    "answer",
    [
        "1e999999999",
        "#### 1e" + "9" * N,
        "1" * N,
        "answer is " + "1" * N,
        "<answer>" + "1+" * N,
        "1 1/" * N,
        "1,222" + ",222" * N + "2",
        "* a " * N,
        r"\boxed{" * N,
        "<answer>" * N,
        "answer is " * N,
        "answer:" + " " * N,
        "####" + " " * N,
        "#### " * N,
        "answer is 1 " + "(" * N,
        "answer is 1 " + "(=" * N,
        "answer is 1 (" + "=" * N,
        "answer is 1 " + "a = 1 " * N,
        "1 " * N + "million",
        "1" + " " * N + "million",
        r"\text{" * N,
        r"\frac{1" * N,
        r"answer is 1 " + r"\a1" * N,
        "<answer>9^9^9^9</answer>",
        "<answer>9**9**9</answer>",
        "<answer>99999999!</answer>",
        r"\boxed{" + "9" * 80 + "^{99}}",
        r"\boxed{" + r"\sqrt{" * 15 + "}",
        r"\boxed{(((9^{99})^{99})^{99})^{99}}",
        r"\boxed{(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13})^{99}}",
        r"\boxed{1/0^0}",
        "\x00" * N,
        "#### 1" + " 111" * N + " 1",
        "<answer>1" + " 111" * N + "/",
        "<answer>0" + ", 0" * N + "x 0",
        "<answer>" + "<" * N,
        "<answer>0" + " " * N + "x",
        "#### \u00bd" * N,
        "</think>" * N,
        r"\boxed{\{" + "1," * 45 + r"2\}}",
        "\ud800",
    ],
    ids=lambda answer: repr(answer[:12]),
)
def test_hostile_answer_is_wrong_in_linear_time(answer: str) -> None:
    # quadratic time would be hours for the long ones; computing the powers would not end
    assert not is_right(answer, "42")


def test_text_is_compared_in_linear_time() -> None:
    assert not is_right(r"\boxed{x" + " " * N + "}", "x y")


def test_works_with_standard_library_alone() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from eval_pipeline.judge.numeric_answer import is_right\n"
        "assert 'sympy' not in sys.modules\n"
        "print(is_right('<answer>42</answer>', '42'), is_right('<answer>6*7</answer>', '42'))"
    )
    # -S leaves site-packages out
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]
