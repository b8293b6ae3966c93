"""Compiles tests once for all answers to a problem; never anything of an answer, whose compiler may not survive it."""

from __future__ import annotations

import functools
import marshal


@functools.lru_cache(maxsize=64)
def compiled(preamble: str, test: str) -> bytes:
    """Both as marshalled code for `inside/tester.py`; empty where they do not compile, which is then for it to say."""
    try:
        # what a server was started with must not take the assertions out
        codes = [
            compile(text, name, "exec", dont_inherit=True, optimize=0)
            for text, name in ((preamble, "<preamble>"), (test, "<test>"))
        ]
        return marshal.dumps(tuple(codes))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return b""
