"""Where the strings in triple quotes of a Python source begin and end, even where the source does not parse."""

from __future__ import annotations

import regex  # unlike `re`, its possessive quantifiers hold before Python 3.11.5

_TRIPLE = r"'''|\"\"\""
_CODE = regex.compile(
    rf"""(?:[^'"#]|(?!{_TRIPLE})(?:'(?:\\.|[^'\\])*+'?|"(?:\\.|[^"\\])*+"?))*+(?P<quote>{_TRIPLE})?"""
)
_IN_STRING = {quote: regex.compile(rf"(?:\\.|(?!{quote})[^\\])*+(?P<end>{quote})?") for quote in ("'''", '"""')}


def open_quote(line: str, quote: str = "") -> str:
    """The triple quote of the string that is open behind a line of Python; empty where none is.

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
