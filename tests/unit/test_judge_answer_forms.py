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
    ("ABD", ("A, B, D", r"\text{A, B and D}", "The answer is A, B, D."), ("A, B", "A, B, C, D")),
    ("B", ("Answer: B<|im_end|>", "Answer: B</s>", "Answer: B<|eot_id|>"), ("Answer: C<|im_end|>",)),
    ("A+B+C", ("A+C+B",), ("A+B+D",)),
]

CHOICES = [
    (
        "B",
        (
            *("<answer>(B) is correct</answer>", "Answer: (B).", "Answer: B, the rate doubles"),
            *("Answer: B \u2013 the rate doubles", "Answer: B - the rate doubles", "Answer: B (not A)"),
            *("A is wrong. I choose B.", "So:\n\nTherefore, the solution is (B).", "<answer>B (not A or C)</answer>"),
        ),
        (
            *("Answer: B, C", "Answer: B, or C", "Answer: B, C both work", "Answer: B - A", "Answer: B - 2"),
            *("Answer: B (or C)", "Answer: A (not B)", "I choose B or C.", "I choose B. I choose C."),
            *("<answer>(B) is incorrect</answer>", "<answer>Option (B) is false</answer>", "Answer: B?"),
            *("<answer>(B)? No.</answer>", "The answer is B? I am not sure; C is my final answer."),
        ),
    ),
]

SEVERAL_FORMULAS = [
    # inequalities
    ("(2,5)", (r"x>2 \text{ and } x<5", r"2<x \land x<5"), (r"x>2 \text{ or } x<5", r"x \ge 2 \text{ and } x<5")),
    (
        r"x<-1 \text{ or } x>3",
        (r"x<-1, x>3", r"x > 3 \lor x < -1", r"(-\infty,-1)\cup(3,\infty)", r"\{x : x<-1 \text{ or } x>3\}"),
        (r"x<-1 \text{ and } x>3", r"x<-1 \land x>3"),
    ),
    (r"\emptyset", (r"x<-1 \text{ and } x>3",), (r"x<-1 \text{ or } x>3",)),
    (r"\{2\}", (r"x \ge 2 \text{ and } x \le 2",), (r"x > 2 \text{ and } x \le 2",)),
    (r"x>2 \text{ and } x<5", ("(2,5)", r"x<5 \text{ and } x>2", "2<x<5"), ("x<5", "x>2 or x<5")),
    (r"x>0 \text{ and } y>0", ("x>0, y>0", "y>0 and x>0"), (r"x>0 \text{ or } y>0", "x>0")),
    (r"x \ne 1 \text{ and } x \ne 2", (r"x \ne 1, x \ne 2", r"\mathbb{R} \setminus \{1,2\}"), (r"x \ne 1",)),
    ("x=1 or x=2", ("x=1 and x=2", "2,1"), ("1",)),
    ("[2,5)", (r"\{x: 2 \le x < 5\}", r"\{x\in\mathbb{R} \mid 2 \leq x < 5\}"), (r"\{x\in\mathbb{Z} : 2\le x<5\}",)),
    # named values
    ("x=3, y=5", ("3,5", "(3,5)", "y=5, x=3"), ("5,3", "(5,3)", r"\{5,3\}", "x=5, y=3")),
    ("3,5", ("5,3", "x=5, y=3"), ("3",)),
    ("(3,-2)", ("y=-2, x=3", "3, -2"), ("x=-2, y=3", "-2, 3")),
    # matrices and vectors
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        (r"\left[\begin{matrix}1&2\\[2pt]3&4\end{matrix}\right]", "[[1,2],[3,4]]"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "[[1,3],[2,4]]", "[1,2],[3,4]"),
    ),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        (r"\langle 1,2\rangle", "(1,2)"),
        ("(2,1)", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ),
    (r"\binom{20}{10}", (r"{20 \choose 10}",), (r"{10 \choose 20}",)),
]

SEVERAL_NUMBERS = [
    ("30", (r"30\text{ minutes}",), (r"2\text{ hours }30\text{ minutes}", "<answer>2 hours 30 minutes</answer>")),
    ("8", (r"x = 8\text{ cm}",), (r"5\text{ ft }8\text{ in}", r"3\text{ cm or }8\text{ cm}")),
    (
        "2",
        (
            *("x_1 = 2", "f(0, 1) = 2", r"\text{Total}=2", "6 - 4 = 2", "<answer>First: 2</answer>"),
            *("|3 - 5| = 2", r"\max\{1, 2\} = 2", r"\gcd(4, 6) = 2", r"\frac{4}{2} = 2", r"P(1|3) = 2"),
        ),
        (
            *(r"7\text{ remainder }2", r"x_1=1,\ x_2=2", r"x_{1}=1,\quad x_{2}=2", r"\theta=1 \text{ or } \theta=2"),
            *("f(0)=1, f(1)=2", "1 | 2", r"\text{Either } 1 \text{ or } 2", r"1\\2", r"\text{max}=1,\ \text{min}=2"),
            *(r"x=1, y=\sqrt{4}", "<answer>between 1 and 2</answer>", "<answer>First: 1. Second: 2.</answer>"),
            *("<answer>f(0) = 1, f(1) = 2</answer>", "<answer>x = 1\ny = 2</answer>", "<answer>1 or 2 cats</answer>"),
        ),
    ),
    (
        "18",
        ("<answer>18, or 18.0</answer>", "The answer is 18 (is it?)."),
        (
            *("<answer>17 or maybe 18</answer>", "<answer>a) 17 b) 18</answer>", "<answer>17\n18</answer>"),
            *("<answer>17 apples and 18 oranges</answer>", "The answer is 18? No, it is 19."),
        ),
    ),
    (
        "42",
        (
            *("<answer>On day 2, 42 apples</answer>", "<answer>In 3 days, 42 apples</answer>"),
            *("<answer>3 boxes and 39 more are 42</answer>", "<answer>The 5 numbers sum to 42</answer>"),
            *("<answer>\n42\n</answer>", "<answer>42 quarters</answer>", "<answer>The factor of 42</answer>"),
            *("The answer is not 5 but 42", "<answer>6 boxes of 7 = 42</answer>"),
        ),
        (
            *("<answer>42 tenths</answer>", "The answer is 42 tenths.", "<answer>42 thirds</answer>"),
            *("<answer>42 hundredths</answer>", "<answer>two times 42</answer>", "<answer>10% of 42</answer>"),
            *("<answer>10 percent of 42</answer>", "<answer>a multiple of 42</answer>", "The answer is 42?"),
            *("<answer>anything except 42</answer>", "<answer>everything but 42</answer>"),
            *("<answer>neither 41 nor 42</answer>", "<answer>42 is incorrect</answer>", r"42\text{ is not it}"),
        ),
    ),
    ("1234", ("1,234", "x=1,234", "<answer>1 234</answer>"), ("1,2,34", "1;234")),
]

UNITS = [
    (r"5 \text{ cm}", ("5", "5.0 cm"), (r"5\text{ cm}^2", "5 cm^3", r"5\text{ m}")),
    (
        r"5 \text{ cm}^2",
        ("5", r"5\,\mathrm{cm}^{2}", r"5\text{ square centimeters}", r"5\text{ sq cm}", "5 cm\u00b2"),
        (r"5\text{ cm}", r"5\text{ cm}^3", r"5\text{ square meters}"),
    ),
    (
        r"9.8 \text{ m/s}^2",
        (
            *("9.8", r"9.8\,\mathrm{m/s^2}", r"9.8\ \text{m}\cdot\text{s}^{-2}", r"9.8 \text{ m s}^{-2}"),
            *(r"9.8 \mathrm{~m} / \mathrm{s}^{2}", r"9.8 \text{ meters per second squared}", r"9.8\text{ m/s/s}"),
        ),
        (r"9.8 \text{ m/s}", r"9.8\text{ m}", r"9.8\text{ m s}^2", r"9.8 \text{ s/m}^2", r"9.8 \text{ km/s}^2"),
    ),
    (r"60 \text{ mph}", ("60", r"60\text{ miles per hour}", r"60 \text{ mi/h}"), (r"60\text{ km/h}",)),
    (r"60^\circ", ("60", r"60\text{ degrees}"), (r"60\text{ rad}", "<answer>60 radians</answer>")),
    (r"60\text{ rad}", ("60",), (r"60^\circ",)),
    (r"\frac{\pi}{3}", (r"\frac{\pi}{3}\text{ radians}", r"\frac{\pi}{3} \text{ rad}"), (r"60^\circ",)),
    (r"\$5", ("5", r"\$5", r"5\text{ dollars}", "The answer is $5."), (r"5\text{ cents}", "5\u20ac", "5 euros")),
    (r"5\text{ cents}", ("5",), (r"\$5", r"5\text{ dollars}")),
    (r"\sqrt{2}", (r"\sqrt2\text{ units}",), (r"\sqrt2\text{ is wrong}", r"\sqrt2\text{ thirds}")),
]

NOTATIONS = [
    (
        "25",
        (
            *(r"{\bf 25}", r"\bm{25}", r"\textcolor{red}{25}", r"\texttt{25}", r"\mathsf{25}", r"\emph{25}"),
            *(r"25 \square", r"$\boxed25$", r"\begin{aligned}25\end{aligned}", r"25\hspace{1em}", "5\u00b2"),
        ),
        (r"{\bf 26}", r"$\boxed2 5$", r"25 \square 2"),
    ),
    (r"\frac{3}{4}", (r"\mathbf{\frac{3}{4}}", r"\mathbf{0.75}"), (r"\mathbf{\frac{4}{3}}",)),
    (r"6.02\times10^{23}", ("6.02 \u00d7 10\u00b2\u00b3",), ("6.02 \u00d7 10\u00b2\u2074",)),
    ("0.001", ("10\u207b\u00b3",), ("10\u00b3",)),
    ("x^{12}", ("x\u00b9\u00b2",), ("x\u00b9\u00b3", "2x")),
    ("3:5", (r"3\colon5",), (r"5\colon3", "6:10")),
    ("2:3:4", (r"2\colon3\colon4",), (r"2\colon3", "4:6:8")),
    (
        r"\text{no solution}",
        (r"\text{No solutions}", r"\emptyset", r"\{\}", "There is no solution"),
        ("0", "one solution"),
    ),
    (r"\emptyset", (r"\text{no solution}", r"\text{empty set}"), (r"\{0\}",)),
    (r"\text{DNE}", (r"\text{does not exist}", "D.N.E."), (r"\text{exists}", r"\infty")),
    (r"\infty", (r"\text{Infinity}",), (r"-\infty", r"\text{negative infinity}")),
    (r"\mathbb{R}", (r"\text{all real numbers}", r"\text{All reals}"), (r"\mathbb{Q}", r"\text{all positive reals}")),
    (
        "7",
        ("seven", "The answer is seven.", "#### Seven", "We have 3 and 4. The answer is seven."),
        ("seventy", r"\text{seven or eight}", "The answer is eight."),
    ),
    ("4", ("four",), ("We have 3 and 4. The answer is seven.",)),
]


SIGNS_AND_SPACES = [
    (
        r"-\frac{1}{2}",
        (r"- \frac{1}{2}", r"x = - \frac12", r"-\,\frac12", r"-{\frac12}", r"-\left(\frac12\right)", r"-\mathbf{0.5}"),
        (r"\frac{1}{2}",),
    ),
    ("-4", ("The answer is $- 4$.", "#### $- 4$", "{-}4", r"-\textbf{4}", "The answer is $$- 4$$"), ("4",)),
    ("4", (), ("The answer is $- 4$.", "#### $- 4$", "{-}4", r"-\textbf{4}", r"-\left(4\right)")),
    ("6", (r"2\left(3\right)", r"\left|-6\right|"), (r"2 - \left(3\right)",)),
    ("1.5", (r"1\ 1/2", r"1\,1/2", r"1 \, \frac{1}{2}"), ("11/2",)),
    ("34", (), (r"3\ 4",)),
    ("1234", (r"1\,234", r"1\ 234"), (r"12\,34",)),
    ("0.123456", (r"0.123\,456",), ("0.123",)),
    ("1234.5", (r"1{,}234{.}5", "#### 1234{.}5", "The answer is 1234{.}5"), ("5", r"12345")),
    ("5", (r"5 \quad (x = 2)", r"5 \text{ when } x = 2"), ("5+i", "5 - i", "5 < x", "5<x")),
    ("1/2", (r"\nicefrac{1}{2}", r"\huge \frac12"), (r"\frac{1}{2} x", r"\frac{1}{2} - x", r"\frac{1}{2} + C")),
    ("2", (), (r"5 \quad (x = 2)", r"5 \text{ when } x = 2")),
    ("12", (r"12\ \Omega", r"12\,\mathrm{k\Omega}", r"12\,\mu m", r"12\,\mu\text{m}"), (r"1\,2\,\Omega",)),
    (
        "4",
        (r"8-\left(4\right)",),
        (
            *("-[4]", r"-\{4\}", "-~4", r"-\text{ }4", "\u20144", r"-\fbox{4}", r"-\boxed{4}", "#### Result: - 4"),
            r"\left(4\right)!",
        ),
    ),
    ("-4", ("-~4", "\u20144", r"-\fbox{4}", r"x = -\boxed{4}", "Answer. Profit: - 4"), (r"10-\boxed{4}",)),
    ("0.5", (r"\frac12\text{ cups}",), (r"\frac12k", r"\frac12bh", r"\frac12!", r"\frac12(a+b)", r"\frac12 < x")),
    (
        "5",
        ("5 kg", "5 hr", "5 hp", "5GB", "<answer>5 PM</answer>", r"5\text{ cm}", r"5\ (n = 2)"),
        ("5ab", "5AB", "5 pq", "i 5", "5 log n", "5C2", "5+", "2x for x = 5"),
    ),
    ("2.5", ("#### 2 and a half hours", r"2\text{ and }\frac12"), ("#### 2 and a third",)),
    ("17", (r"\ensuremath{17}", r"\mathnormal{17}"), ()),
    ("6", ("(2)(3)", r"\left(2\right)\left(3\right)"), ("(2)(4)",)),
    ("210", ("C(10,4)", r"{}_{10}C_4"), ("C(10,5)",)),
    ("210", ("P(7,3)", "P(7, 3) = 210", r"{}_7P_3", "#### P(7, 3)"), ("P(7,4)", "P(3,7)", "P(7)", "P(7,3) = 0.5")),
    ("P(4,3)", ("P(4,3)",), ("24",)),
    ("0.5", ("P(4,3) = 0.5", "P(A) = 0.5"), ("P(4,3) = 24",)),
    (r"33\frac13\%", (r"\frac13",), (r"\frac23",)),
    ("3:4", (r"3\text{ to }4", "3 to 4"), (r"4\text{ to }3",)),
    (r"5\text{ cm}", ("5cm",), ("5mm",)),
    (r"2\sqrt{3}", (r"\mathbf{2\sqrt{3}}",), (r"\mathbf{3\sqrt{2}}",)),
]

STATEMENTS = [
    ("18", ("The answer is 20. Wait, no. The answer is 18.", "#### 20, no. #### 18"), ()),
    ("20", (), ("The answer is 20. Wait, no. The answer is 18.", "#### 20, no. #### 18")),
    (
        "3",
        ("The answer is 3 hours.", "The answer is 3 dollars a day.", "The answer is 3 days and 20 are left"),
        (
            *("The answer is 3 hours and 20 minutes.", "#### 3 feet 8 inches", "The answer is 3 and a half."),
            *("The answer is 3 hours and 20", "#### 3 feet 8", r"#### 3\text{ hours and }20\text{ minutes}"),
            *("#### 3 remainder 2", "#### 3 or more", "The answer is 3 times 7.", "#### 3 to the power of 4"),
            *("#### 3 over 4", "The answer is 3 sqrt(2).", "#### 3+", "The answer is 3 < x < 5.", "#### 3 and up"),
        ),
    ),
    ("1/3", ("#### 1/3 of them",), ()),
    ("3", ("The function has a maximum of 3", "The answer is 3 (since 1 + 2 = 3)."), ()),
    (
        "42",
        (
            "<answer>The largest number in {40, 41} plus 1 is 42</answer>",
            *("#### 42; 3 apples are left", "#### 42 (or 42.0)", "The answer is 42, but it could be simplified."),
            *("The answer is 42, but 43 is close.", "The answer is 42, though it may be a bit less than 43."),
        ),
        (
            *("The answer is 42 (or 43).", "The answer is 42; 43; 44", "The answer is 42, maybe 43."),
            r"42\text{ or none}",
            *("The answer is probably 42, but it could be 43.", "It is 43, but it might also be 42"),
            *("The answer is 42, or perhaps $43$", "<answer>43, but it could be 42</answer>"),
            *("<answer>x where x is in {41, 42}</answer>", r"#### x \in \{41,42\}", "x is in the set {41, 42}."),
            *("The answer is x = 42, y = 43", "<answer>41 and/or 42</answer>", "<answer>one of 40, 41, 42</answer>"),
        ),
    ),
    ("x+1", ("The answer is x+1, but it could be written as 1+x",), ("The answer is x+1, but it could be x+2.",)),
    (r"\frac{\pi}{3}", (r"60^\circ = \frac{\pi}{3}",), ()),
    ("0.75", ("My answer: the probability is 75%.",), ("My answer: the probability is 7.5%.",)),
    ("75%", ("**Answer** 0.75",), ("**Answer** 0.075",)),
]

CHINESE = [
    ("12", ("\u7b54\u6848\u662f12\u3002", "\u7b54\u6848\uff1a12\uff08\u4e2a\uff09"), ()),
    (
        "12",
        (),
        (
            *("\u7b54\u6848\u4e0d\u662f12", "\u7b54\u6848\u5c0f\u4e8e12", "\u7b54\u6848\u662f\u4e0d\u5927\u4e8e12"),
            *("\u7b54\u6848\u662f12\u621613\u3002", "\u7b54\u6848\u662f12\u300113\u300114"),
        ),
    ),
    ("-4", ("\u7b54\u6848\u662f\u8d1f4",), ("\u7b54\u6848\u662f4",)),
    ("70000", ("\\boxed{7\\text{\u4e07}}",), ("\\boxed{70\\text{\u4e07}}",)),
    ("\u5317\u4eac", ("\u7b54\u6848\u662f\u5317\u4eac\u3002",), ("\u7b54\u6848\u662f\u4e0a\u6d77\u3002",)),
    (
        r"2\sqrt{3}",
        ("\u6545\u7b54\u6848\u4e3a\uff1a$2\\sqrt{3}$\u3002",),
        ("\u7b54\u6848\u4e0d\u662f $2\\sqrt{3}$\u3002",),
    ),
    ("B", ("\u7b54\u6848\u662f\uff08B\uff09", "\u6545\u9009B", "\u3010\u7b54\u6848\u3011B"), ("\u6545\u9009A",)),
    (
        "B",
        (
            *("\u9009\u9879B\u6b63\u786e\u3002", "\u6240\u4ee5\u9009\u9879B\u662f\u6b63\u786e\u7684\u3002"),
            *("\\boxed{B\u9009\u9879}", "\\boxed{\u9009B}", "\u6211\u7684\u9009\u62e9\u662fB\u3002"),
        ),
        ("\u9009\u9879B\u4e0d\u6b63\u786e\u3002", "\u9009\u9879A\u6b63\u786e\u3002"),
    ),
    ("-4", ("\\boxed{\\text{\u8d1f}4}",), ("\\boxed{4}",)),
    ("7", (), ("\\boxed{7\\text{\u4ee5\u4e0a}}",)),
    ("12", (), ("\u7b54\u6848\u662f12\u548c13\u3002",)),
    ("4", (), ("\\boxed{3}\u548c\\boxed{4}", "\\boxed{3}\u6216\u8005\\boxed{4}")),
]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [*SIGNS_AND_SPACES, *STATEMENTS],
)
def test_signs_spaces_and_statements(reference: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert [answer for answer in (*right, *wrong) if is_right(_tagged(answer), reference)] == [*right]


@pytest.mark.parametrize(("reference", "right", "wrong"), CHINESE)
def test_chinese_answers(reference: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert [answer for answer in (*right, *wrong) if is_right(answer, reference)] == [*right]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [*LETTERS_AND_WORDS, *CHOICES, *SEVERAL_FORMULAS, *SEVERAL_NUMBERS, *UNITS, *NOTATIONS],
)
def test_accepts_exactly_right_forms(reference: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    accepted = [answer for answer in (*right, *wrong) if is_right(_tagged(answer), reference)]
    assert accepted == [*right]


def _tagged(answer: str) -> str:
    is_tagged = any(tag in answer.lower() for tag in ("answer", "####", "box", "choose", "solution is"))
    return answer if is_tagged else rf"So it is $\boxed{{{answer}}}$."


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (r"\boxed{Alice = knight, Bob = knave}", "Alice = Knight, Bob = Knave", True),
        (r"\boxed{Red=Blue}", "red=green", False),
        (r"\boxed{[Red, Blue]}", "[red, blue]", True),
        ("Claire will eat 7 dozens of eggs in 4 weeks.\n#### 7 dozens", "7", True),
        (r"$\boxed{7 \text{ dozens}}$", "7", True),
        (r"\boxed{\max(f(1), f(2)) = 8}", "8", True),
        (r"\boxed{|(3,4)| = 5}", "5", True),
        ("<answer>2, 4, 6 and 8 sum to 20</answer>", "20", True),
        (r"\boxed{a+b+k}", "a+b+c", False),
        (r"\boxed{3d + k}", "3d + D", False),
        (r"\boxed{x^2 + k}", "x^2 + C", True),
        (r"\boxed{x^2 + C}", "x^2 + c", True),
    ],
)
def test_words_brackets_and_constants(answer: str, reference: str, expected: bool) -> None:
    assert is_right(answer, reference) is expected
