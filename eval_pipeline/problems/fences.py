"""Fenced code blocks of a Markdown text, as models write them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cached_property

import regex  # unlike `re`, its possessive quantifiers hold before Python 3.11.5

from eval_pipeline.problems.python_source import MAX_PARSED_CHARS, SourceParser

PYTHON_TAGS = ("python", "py", "python3", "py3")
LANGUAGES = frozenset(
    (*PYTHON_TAGS, "bash", "c", "c#", "c++", "console", "cpp", "csharp", "css", "diff", "go", "haskell", "html")
    + ("ini", "input", "ipython", "java", "javascript", "js", "json", "kotlin", "latex", "markdown", "math", "md")
    + ("none", "output", "pascal", "php", "plain", "plaintext", "powershell", "pseudocode", "pycon", "r", "ruby")
    + ("rust", "scala", "sh", "shell", "sql", "swift", "tex", "text", "toml", "ts", "txt", "typescript", "xml", "yaml")
)
"""Tags that begin a block even if another one is still open."""
_REASONING_ENDS = ("</think>", "</thinking>", "[/THINK]")
"""A block does not continue after the reasoning that it began in."""
MAX_FAILED_READINGS = 8
"""After this many in one text, its blocks end at the first fence, because each reading may scan the whole text."""
_READING_CHARS = MAX_PARSED_CHARS // 3
"""Characters to parse while finding the blocks of a text; the rest is for their content."""
MAX_CUTS = 4
"""Maximum number of fences after code that are tried as the end of a block."""

# models also open a block at the end of a line of prose; the fences of a `~~~` block are on lines of their own
_OPENING = regex.compile(
    r"(?:[^`]*+(?P<ticks>`{3,}+)|[ \t]*+(?P<tildes>~{3,}+))[ \t]*+(?P<tag>[\w+#-]*+)(?P<rest>[^`]*+)"
)
# a block on one line, as in "```python print(1)```"; without a tag and with other text on the line, it is prose
_ONE_LINE = regex.compile(
    rf"(?<!`)```(?i:(?P<tag>{'|'.join(PYTHON_TAGS)}))[ \t]++(?P<body>[^`\n]++)```(?!`)"
    r"|^[ \t]*+```(?P<body>[^`\n]++)```[ \t]*+$",
    regex.MULTILINE,
)
# other text on the line of the fence is a title or the like
_CODE_ON_OPENING = regex.compile(
    r"(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+\w|(?:async[ \t]+def|def|class)[ \t]+\w|@\w|\w[\w, ]*[ \t]=[ \t])"
)
_CLOSING = regex.compile(r"[ \t]*+(?P<fence>`{3,}+|~{3,}+)(?P<gap>[ \t]*+)(?P<tag>[\w+#-]*+)(?P<rest>.*+)")


@dataclass(frozen=True)
class FencedBlock:
    """One block, unchanged."""

    tag: str
    """Language in lower case; empty if there is none."""
    body: str
    """The lines between the fences, with their indentation."""
    closed: bool = True
    """False if the text ends inside the block."""

    @cached_property
    def source(self) -> str:
        """The body, moved to the left margin."""
        # only if necessary, because `dedent` also empties blank lines, which may be part of a string
        return textwrap.dedent(self.body) if self.body.lstrip("\n")[:1].isspace() else self.body


def fenced_blocks(text: str) -> list[FencedBlock]:
    """The code blocks between ``` or ~~~ fences, in order. Lines end with `\\n`.

    A block ends at a line that begins with a fence of its kind and at least its length, whatever follows; if the tag of
    a language follows, the next block begins. A block that the token limit cut off runs to the end of the text.

    The blocks of a Markdown document between longer or ~~~ fences replace the block of the document.

    Python may contain fences in its strings, and a model may write the closing fence after code on the same line. So a
    Python block that does not parse ends at the first fence outside strings, or else after code, with which it parses.
    """
    return _Scan(text.split("\n"), SourceParser(_READING_CHARS)).blocks


def one_line_blocks(text: str) -> list[FencedBlock]:
    """The blocks that begin and end on one line, in order."""
    return [FencedBlock((found["tag"] or "").lower(), found["body"].strip()) for found in _ONE_LINE.finditer(text)]


@dataclass(frozen=True)
class _Fence:
    mark: str
    tag: str
    rest: str = ""
    """The text after the tag."""


class _Scan:
    """One pass through the lines of a text."""

    def __init__(self, lines: list[str], parser: SourceParser, is_nested: bool = False) -> None:
        self._lines = lines
        self._failed_readings = 0
        self._parser = parser
        self._is_nested = is_nested
        self.blocks: list[FencedBlock] = []
        index, fence = 0, None
        while index < len(lines):
            if fence is None:
                fence = _opened_by(lines[index])
                index += 1
            if fence is not None:
                index, fence = self._read_block(index, fence)

    def _read_block(self, start: int, fence: _Fence) -> tuple[int, _Fence | None]:
        """Keep the block that begins at a line; returns the next line, and the fence if the end opens another block."""
        end = self._next_closing(start, fence)
        if fence.tag in ("", *PYTHON_TAGS) and self._failed_readings < MAX_FAILED_READINGS:
            end, cut = self._python_end(start, end, fence)
            if cut is not None:
                self._keep(fence, _joined([*self._lines[start:end], cut]))
                return end + 1, None
        closed = end < len(self._lines)
        self._keep(fence, _joined(self._lines[start:end]) if closed else "\n".join(self._lines[start:]), closed)
        return end + 1, _reopened_by(self._lines[end]) if closed else None

    def _keep(self, fence: _Fence, body: str, closed: bool = True) -> None:
        if fence.tag in PYTHON_TAGS and fence.rest.strip():
            whole, alone = f"{fence.rest.strip()}\n{body}", FencedBlock("", body).source
            begins = _CODE_ON_OPENING.match(fence.rest.strip()) or not body.strip() or not self._parser.tree(alone)
            if begins and self._parser.tree(whole):
                body = whole
        is_document = fence.tag in ("markdown", "md") or body.lstrip().startswith(("```", "~~~"))
        if fence.mark != "```" and is_document and not self._is_nested:
            # only one level, so that an answer cannot cause unlimited recursion
            nested = _Scan(body.split("\n"), self._parser, is_nested=True).blocks
            if nested:
                self.blocks += nested
                return
        self.blocks.append(FencedBlock(fence.tag, body, closed))

    def _next_closing(self, start: int, fence: _Fence) -> int:
        lines = self._lines
        return next((index for index in range(start, len(lines)) if _closes(lines[index], fence)), len(lines))

    def _python_end(self, start: int, end: int, fence: _Fence) -> tuple[int, str | None]:
        """Where a block of Python ends, and the code before the fence on that line, if any."""
        beyond = self._end_outside_strings(start, end, fence)
        cuts = [index for index in range(start, end) if fence.mark in self._lines[index]][:MAX_CUTS]
        if beyond != end or cuts:
            if self._is_python(self._lines[start:beyond]):
                return beyond, None
            for index in cuts:
                code = self._lines[index].partition(fence.mark)[0]
                if self._is_python([*self._lines[start:index], code]):
                    return index, code
        return end, None

    def _end_outside_strings(self, start: int, end: int, fence: _Fence) -> int:
        """The first closing fence outside strings, starting at `end`, the first closing fence."""
        quote = ""
        for index in range(start, len(self._lines)):
            if index >= end and not quote and _closes(self._lines[index], fence):
                return index
            quote = open_quote(self._lines[index], quote)
        return len(self._lines)

    def _is_python(self, lines: list[str]) -> bool:
        if self._failed_readings >= MAX_FAILED_READINGS:
            return False
        is_python = self._parser.tree(FencedBlock("", _joined(lines)).source) is not None
        self._failed_readings += not is_python
        return is_python


def _opened_by(line: str) -> _Fence | None:
    opening = _OPENING.fullmatch(line)
    return opening and _Fence(opening["ticks"] or opening["tildes"], opening["tag"].lower(), opening["rest"])


def _closes(line: str, fence: _Fence) -> bool:
    return line.lstrip(" \t").startswith((fence.mark, *_REASONING_ENDS))


def _reopened_by(line: str) -> _Fence | None:
    """The block that a closing line opens: "```python", but not "``` Text like this"."""
    closing = _CLOSING.fullmatch(line)
    if closing is None:
        return None  # reasoning ends
    tag, stands_alone = closing["tag"].lower(), not closing["gap"] or not closing["rest"].strip()
    return _Fence(closing["fence"], tag) if tag in LANGUAGES and stands_alone and "`" not in closing["rest"] else None


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# Triple-quoted strings of Python, even in a source that does not parse

_TRIPLE = r"'''|\"\"\""
_CODE = regex.compile(
    rf"""(?:[^'"#]|(?!{_TRIPLE})(?:'(?:\\.|[^'\\])*+'?|"(?:\\.|[^"\\])*+"?))*+(?P<quote>{_TRIPLE})?"""
)
_IN_STRING = {quote: regex.compile(rf"(?:\\.|(?!{quote})[^\\])*+(?P<end>{quote})?") for quote in ("'''", '"""')}


def open_quote(line: str, quote: str) -> str:
    """The triple quote of the string that is open after a line of Python; empty if there is none.

    Args:
        line: without its end.
        quote: the triple quote that is open before it.
    """
    at = 0
    while True:
        if quote:
            inside = _matched(_IN_STRING[quote], line, at)
            if not inside["end"]:
                return quote
            at = inside.end()
        outside = _matched(_CODE, line, at)
        if not outside["quote"]:
            return ""
        at, quote = outside.end(), outside["quote"]


def _matched(pattern: regex.Pattern[str], line: str, at: int) -> regex.Match[str]:
    match = pattern.match(line, at)
    assert match is not None  # both patterns match the empty text
    return match
