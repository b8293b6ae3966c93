"""Requests for evaluation engines, and processes that own an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import Engine, GeneratedAnswer, GenerateRequest
from tests.helpers import ROOT, warm
from tests.helpers.commands import environment
from tests.helpers.processes import family_of, words_of

MAX_MODEL_LEN = 512
GREEDY = SamplingConfig(max_tokens=24)
LONG = SamplingConfig(max_tokens=400)
REQUESTS = [GenerateRequest(f"p{i}", f"Prompt number {i}. " * (2 + i % 7)) for i in range(60)]
"""With the chat template, more tokens in total than vLLM schedules in one step on a CPU (4096)."""


def make_export(directory: Path) -> Path:
    """A model with random weights."""
    from tests.helpers.models import make_model, make_tokenizer, save

    tokenizer = make_tokenizer()
    return save(directory / "huggingface", make_model(tokenizer, MAX_MODEL_LEN), tokenizer)


def answer_all(
    engine: Engine, requests: Sequence[GenerateRequest], sampling: SamplingConfig
) -> dict[tuple[str, int], GeneratedAnswer]:
    """The answers by problem and sample; each request has one."""
    answers = {(request.problem_id, request.sample): answer for request, answer in engine.answers(requests, sampling)}
    assert len(answers) == len(requests)
    return answers


def vllm_processes(owner: subprocess.Popen[Any] | psutil.Process) -> list[psutil.Process]:
    """The processes that hold vLLM for an owner."""
    return [child for child in family_of(owner) if "eval_pipeline.engines.vllm_process" in words_of(child)]


@dataclass
class Owner:
    """A process of `tests/ranks/engine_owner.py`.

    Attributes:
        process: the owner.
    """

    process: subprocess.Popen[str]

    def line(self) -> Any:
        """The next value that it prints; None at its end."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        return json.loads(text) if text else None


@contextmanager
def owner_of(export: Path, settings: EngineConfig, *, cold: bool = False) -> Iterator[Owner]:
    """Start a process that opens an engine and uses it until the engine dies; it has ended after the block.

    Args:
        export: the model.
        settings: configuration of the engine.
        cold: start new processes only.
    """
    words = [sys.executable, "-m", "tests.ranks.engine_owner", str(export), json.dumps(asdict(settings))]
    options = {"cwd": ROOT, "env": environment(), "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **options) if cold else warm.popen(words, imports="vllm", **options)
    try:
        yield Owner(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
