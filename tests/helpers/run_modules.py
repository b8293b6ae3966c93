"""Runs several commands in one process: a JSON list of [MODULE, WORD...] on stdin, their outputs as JSON on stdout."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys


def run(module: str, words: list[str]) -> str:
    """What `python -m MODULE WORD...` prints; any other exit code than 0 ends this process."""
    output = io.StringIO()
    sys.argv[1:] = words
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise RuntimeError(f"{module} {' '.join(words)}: exit code {leaving.code}") from leaving
    return output.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(module, words) for module, *words in json.load(sys.stdin)]))
