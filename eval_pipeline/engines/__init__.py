"""The interface of inference engines: vLLM in a child process, or a running OpenAI-compatible server."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_pipeline.config import SamplingConfig
from verl_ext.errors import UserError


@dataclass(frozen=True)
class GenerateRequest:
    """A request for one answer."""

    problem_id: str
    prompt: str
    """The user's message, without a chat template."""
    sample: int = 0
    """Index of the answer to this problem, from 0."""
    earlier: tuple[tuple[str, str], ...] = ()
    """Role and text of the turns before that message."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that the answer continues."""
        return [{"role": role, "content": text} for role, text in (*self.earlier, ("user", self.prompt))]


@dataclass(frozen=True)
class GeneratedAnswer:
    """The model's answer to one prompt."""

    text: str
    num_tokens: int
    """New tokens, including the end-of-turn token."""
    truncated: bool
    """Whether the token limit or the model's context length cut off the answer."""
    error: str | None = None
    """Why generation failed; None if it succeeded."""

    @staticmethod
    def failed(reason: str) -> GeneratedAnswer:
        """An answer with an error that the prompt caused."""
        return GeneratedAnswer("", 0, False, error=reason)


@dataclass(frozen=True)
class ServedModel:
    """One entry of a server's `/v1/models`, which identifies the model wherever the server runs."""

    id: str
    """The name used in requests."""
    root: str | None
    """The directory or Hub name that the server loaded. vLLM's server reports it, OpenAI's does not."""
    max_model_len: int | None
    """Tokens of prompt and answer together. vLLM's server reports it."""

    @staticmethod
    def from_entry(entry: Mapping[str, Any]) -> ServedModel:
        """Read the server's JSON.

        Raises:
            AttributeError, KeyError: the entry is malformed.
        """
        root, length = entry.get("root"), entry.get("max_model_len")
        return ServedModel(
            str(entry["id"]),
            root if isinstance(root, str) else None,
            length if isinstance(length, int) else None,
        )

    def is_loaded_from(self, export: Path) -> bool:
        """Whether the server reports that it loaded this directory. Relative paths are ambiguous and never match."""
        named = [Path(name) for name in (self.id, self.root) if name is not None]
        return any(path.is_absolute() and path.resolve() == export.resolve() for path in named)

    def __str__(self) -> str:
        return self.id if self.root in (None, self.id) else f"{self.id} (loaded from {self.root})"


class ModelRefused(UserError):
    """The engine cannot run the model. A retry with the same settings would fail in the same way."""


class EngineDied(Exception):
    """The engine's process ended or hangs, or the server does not respond. A retry may succeed."""


class Engine(ABC):
    """Generates answers. Entering the context starts the engine; leaving it stops all of its processes.

    Attributes:
        protocol: settings besides sampling that affect results, for `metrics.json`; set at start.
        seconds: wall-clock seconds so far, by phase: `import_s`, `load_s` and `generate_s`.
    """

    protocol: dict[str, Any]
    seconds: dict[str, float]

    @abstractmethod
    def __enter__(self) -> Engine:
        """Start the engine.

        Raises:
            UserError: the model or the server cannot be used; a `ModelRefused` if a retry cannot succeed.
            EngineDied: the engine's process ended or hung while it loaded the model.
        """

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        """Answer every request. Call it again only after the iterator is exhausted or closed.

        Args:
            requests: in the order in which the engine starts them.
            sampling: sampling parameters; `num_samples` is ignored, because each request is for one answer.

        Yields:
            Each request with its answer, once finished. If the prompt causes an error, the answer has an `error`.

        Raises:
            EngineDied: the engine's process ended or hangs, or the server does not answer.
        """


def request_seed(request: GenerateRequest, sampling: SamplingConfig) -> int | None:
    """The seed of one answer, independent of the engine and of other requests.

    Returns:
        31 bits, which every server accepts; None for a greedy answer.
    """
    if sampling.temperature == 0:
        return None
    name = f"{sampling.seed}/{request.sample}/{request.problem_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1
