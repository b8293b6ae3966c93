"""Every command in the documentation parses."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator

import pytest

from eval_pipeline.__main__ import parse as parse_evaluation
from tests.helpers import ROOT
from tests.helpers.docs import PAGES
from verl_ext.commands import COMMANDS as PRODUCT
from verl_ext.data.prepare import parse_arguments as parse_preparation
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.trainer.stages import load_config


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command line in a code block, without lines that show syntax."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and "NUM_PROCESSES" not in words and not page.name == "cluster.md":  # it has a test of its own
                    yield page.name, [word for word in words if not re.match(r"[A-Z_]+=", word)]


COMMANDS = list(commands())


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(words)[:60] for _, words in COMMANDS])
def test_documented_command_parses(page: str, words: list[str]) -> None:
    program, *rest = words
    if program == "verl-ext":
        command = PRODUCT[rest[0]]
        program, rest = ("bash", [command.script, *rest[1:]]) if command.script else ("python", ["-m", command.module])
    if program == "verl-ext":
        command = PRODUCT[rest[0]]
        program, rest = ("bash", [command.script, *rest[1:]]) if command.script else ("python", ["-m", command.module])
    if program == "bash" and (script := re.fullmatch(r"run_(sft|grpo)\.sh", rest[0])):
        arguments = parse_arguments([script[1], *rest[1:]])
        assert load_config(script[1], arguments.overrides).stage and arguments.num_processes
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
        if rest[0] == "eval_pipeline/run.sh":
            assert parse_evaluation(rest[1:]).action
    elif "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :]
        if module == "eval_pipeline":
            assert parse_evaluation(arguments).action
        elif module == "verl_ext.data.prepare":
            assert parse_preparation(arguments).output
        elif module.startswith(("verl_ext", "benchmarks", "tests")):
            assert importlib.util.find_spec(module) is not None
    else:
        assert program in (".venv-lmms/bin/pip", "pip", "git", "cd", "touch", "kill"), program
