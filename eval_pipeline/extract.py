"""Finds the program in a model's answer."""

from __future__ import annotations

import re
import textwrap

PYTHON_TAGS = {"", "python", "py", "python3"}

# an answer cut off at the token limit leaves its last fence open: such a block runs to the end of the text
_FENCED_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def extract_code(answer: str, entry_point: str) -> str:
    """The program that an answer means to hand in.

    Args:
        answer: the model's whole text, prose and Markdown included.
        entry_point: name that the tests will call.

    Returns:
        The last fenced Python block that defines `entry_point`; if none does, the last fenced block; if there is no
        fence, the answer itself. A block without a language tag counts as Python.
    """
    blocks = [(tag.lower(), textwrap.dedent(body)) for tag, body in _FENCED_BLOCK.findall(answer.replace("\r\n", "\n"))]
    for tag, body in reversed(blocks):
        if tag in PYTHON_TAGS and _defines(body, entry_point):
            return body
    return blocks[-1][1] if blocks else answer


def _defines(code: str, name: str) -> bool:
    # by pattern and not by `ast`: a block that does not parse is still the one that the answer meant
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=)"
    return re.search(pattern, code, re.MULTILINE) is not None
