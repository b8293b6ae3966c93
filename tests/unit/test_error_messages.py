"""What users are told is wrong reads as if one person wrote it: `what is wrong; how to mend it`, in one sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers import ROOT

FOLDERS = ("verl_ext", "eval_pipeline", "benchmarks")
FOR_PROGRAMMERS = {"verl_ext/metrics/reduce.py", "verl_ext/metrics/row.py", "verl_ext/metrics/run_record.py"}
"""Names and types that the code itself gets wrong; nobody can mend them on a command line."""


def text_of(node: ast.expr) -> str:
    """A message as it is written, each placeholder as {}."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def messages(function: str) -> Iterator[tuple[str, str]]:
    """Where each message is that goes to a function, and its text."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and node.args
                and ast.unparse(node.func) == function
                and name not in FOR_PROGRAMMERS
            ):
                yield f"{name}:{node.lineno}", text_of(node.args[0])


def fault_of(text: str) -> str | None:
    """What is wrong with the form of a message."""
    if re.match(r"[A-Z][a-z]", text):
        return "begins as a sentence, though it stands behind `error: `"
    if text.endswith("."):
        return "ends with a full stop, though it may stand inside another message"
    # one that ends with another's message, or a program's last words, has its remedy there
    if "; " not in text and not re.search(r"\bmust\b", text) and not text.endswith("{}"):
        return "does not say how to mend it"
    return None


def test_every_message_is_one_sentence_with_a_remedy() -> None:
    found = list(messages("UserError"))
    assert len(found) > 400
    assert not [(place, text, fault) for place, text in found if (fault := fault_of(text))]


def test_warnings_have_the_same_form() -> None:
    found = [text for _, text in messages("warn")]
    assert len(found) > 20
    assert not [text for text in found if re.match(r"[A-Z][a-z]", text) or text.endswith(".")]


def test_the_scripts_keep_the_form() -> None:
    found = []
    for path in [*(ROOT / "scripts").glob("*.sh"), *ROOT.glob("*.sh"), *ROOT.glob("*/run.sh")]:
        found += re.findall(r'echo "(?:error|warning): (.*)" >&2', path.read_text())
    assert len(found) > 5
    assert not [text for text in found if fault_of(text) and "$wrong" not in text]
