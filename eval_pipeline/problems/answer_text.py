"""An answer as text and blocks, before it is known what is asked of its program."""

from __future__ import annotations

import re

from eval_pipeline.problems.fences import LANGUAGES, FencedBlock, fenced_blocks

_BYTE_ORDER_MARK = re.compile("^\ufeff+", re.MULTILINE)
# not where a string or code in prose names the tag
_REASONING_END = re.compile(r"(?:</think(?:ing)?>|\[/THINK\])(?![\"'\\]|`(?!``))")
# MBPP's own prompt asks for code between these (Austin et al. 2021, section 3)
_MARKER = re.compile(r"^[ \t]*\[(?:(?P<begin>BEGIN)\][ \t]*$|DONE\].*$)", re.MULTILINE)


def clean_text(answer: str) -> str:
    """The answer with `\\n` line ends, without byte-order marks, and with fences for MBPP's `[BEGIN]` and `[DONE]`."""
    text = _BYTE_ORDER_MARK.sub("", answer.replace("\r\n", "\n"))
    first = _MARKER.search(text)
    if first is None:
        return text
    if "```" in text:
        return _MARKER.sub("", text)
    if not first["begin"]:  # the prompt ended with [BEGIN]
        text = f"[BEGIN]\n{text}"
    return _MARKER.sub(lambda marker: "```python" if marker["begin"] else "```", text)


def behind_reasoning(text: str) -> str | None:
    """What follows the last `</think>`; None where there is none."""
    ends = [end.end() for end in _REASONING_END.finditer(text)]
    return text[ends[-1] :] if ends else None


def code_blocks(text: str) -> list[FencedBlock]:
    """The fenced blocks that are not empty; all where every one is."""
    blocks = fenced_blocks(text)
    return [block for block in blocks if block.body.strip()] or blocks


def code_before(blocks: list[FencedBlock], text: str) -> str | None:
    """What stands before the one fence that may end code instead of beginning it, in an answer that began inside a
    block; None where the fences are others."""
    if len(blocks) != 1 or blocks[0].closed or blocks[0].tag in LANGUAGES:
        return None
    return re.split(r"```|^[ \t]*~~~", text, maxsplit=1, flags=re.MULTILINE)[0]
