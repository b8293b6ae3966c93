"""Modules put in the place of others for a while."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def swapped(places: Mapping[tuple[nn.Module, str], nn.Module]) -> Iterator[None]:
    """Put modules into places, each given by its parent and its name there, and the former ones back at the end."""
    former = {place: place[0]._modules[place[1]] for place in places}
    try:
        for (parent, name), module in places.items():
            parent._modules[name] = module
        yield
    finally:
        for (parent, name), old in former.items():
            parent._modules[name] = old


class Skipped(nn.Module):
    """A transformer block that does not run: hidden states pass, and no keys or values are kept.

    Args:
        answer: makes what such a block returns from its hidden states.
    """

    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The hidden states as they came."""
        return self._answer(hidden_states)


class Remembered(nn.Module):
    """A vision encoder that was run before: it gives what it gave then.

    Args:
        encoder: whose other attributes are still asked for.
        output: what it returned.
    """

    def __init__(self, encoder: nn.Module, output: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_encoder", encoder)  # not as a child: its parameters belong to the model
        self._output = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_encoder"), name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """A copy of what the encoder returned, for Qwen-VL models replace parts of what they get from it."""
        return copy.copy(self._output)
