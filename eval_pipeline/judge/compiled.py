"""Compiles tests once for all answers to a problem; never anything of an answer, whose compiler may not survive it."""

from __future__ import annotations

import functools
import marshal
from typing import NamedTuple

from eval_pipeline.judge.footprint import leaves_nothing


class CompiledTest(NamedTuple):
    """A test as `inside/tester.py` takes it."""

    code: bytes = b""
    """Preamble and test, marshalled; empty where they do not compile, which is then for the tester to say."""
    leaves_nothing: bool = False
    """Whether another test may run in the same process afterwards."""


@functools.lru_cache(maxsize=64)
def compiled(preamble: str, test: str) -> CompiledTest:
    """A test with its preamble."""
    try:
        # what a server was started with must not take the assertions out
        codes = [
            compile(text, name, "exec", dont_inherit=True, optimize=0)
            for text, name in ((preamble, "<preamble>"), (test, "<test>"))
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return CompiledTest()
    return CompiledTest(marshal.dumps(tuple(codes)), all(map(leaves_nothing, codes)))
