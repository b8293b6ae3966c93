"""Tokens of a training sample, colored by their log-probabilities or by the loss mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nicegui import ui

from verl_ext.metrics.jsonl import SAMPLE_TOKENS_FILE, parse_object
from verl_ext.monitor.colors import BLUE, MAX_OPACITY, ORANGE

TOKENS_PER_PAGE = 2000
"""Maximum number of tokens to show at once."""
SHOWN_PROMPT_TOKENS = 50
"""Number of tokens of the prompt to show before the completion."""
MIN_SCALE = 1e-3
"""Smallest difference, in nats, with the full color."""
DIFFERENCE, MASK = "", "mask"
"""What the colors show, in the address."""


@dataclass(frozen=True)
class Token:
    """A token of a prompt or of a completion.

    Attributes:
        text: the token, decoded.
        in_loss: whether it counts in the loss.
        rollout: its log-probability in the rollout engine; None in a prompt.
        trainer: its log-probability in the trainer before the update; None in a prompt.
    """

    text: str
    in_loss: bool
    rollout: float | None
    trainer: float | None

    @property
    def difference(self) -> float | None:
        """Log-probability of the trainer minus that of the engine, in nats."""
        return None if self.rollout is None or self.trainer is None else self.trainer - self.rollout


def read_tokens(run_dir: Path, sample: Mapping[str, Any]) -> list[Token]:
    """Return tokens of a row of `samples.jsonl`: the end of the prompt, then the completion; empty if not logged."""
    keys = ("step", "attempt", "sample_id", "number")
    if sample.get("split") != "train" or not all(name in sample for name in keys):
        return []
    start = f'{{"step": {sample["step"]}, "attempt": {sample["attempt"]}, '.encode()
    try:
        with open(run_dir / SAMPLE_TOKENS_FILE, "rb") as file:
            for line in file:
                if (
                    line.startswith(start)
                    and (row := parse_object(line))
                    and all(row.get(n) == sample[n] for n in keys)
                ):
                    return tokens_of(row)
    except OSError:  # nothing was logged, or the directory was removed
        return []
    return []


def tokens_of(row: Mapping[str, Any]) -> list[Token]:
    """Return the tokens of a row of `sample_tokens.jsonl`."""
    names = ("texts", "loss_mask", "rollout_log_probs", "trainer_log_probs")
    columns = [found if isinstance(found := row.get(name), list) else [] for name in names]
    tokens = [
        Token(str(text), bool(mask), _number(rollout), _number(trainer))
        for text, mask, rollout, trainer in zip_longest(*columns)
    ]
    first = next((place for place, token in enumerate(tokens) if token.rollout is not None), len(tokens))
    begin = max(0, first - SHOWN_PROMPT_TOKENS)
    return tokens[begin:]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def num_pages(tokens: Sequence[Token]) -> int:
    """Return the number of pages that `draw_tokens` needs."""
    return math.ceil(len(tokens) / TOKENS_PER_PAGE)


def draw_tokens(tokens: Sequence[Token], page: int, kind: str, say: Callable[[str], str]) -> None:
    """Create a legend and a span for each token of a page, with its log-probabilities as a tooltip.

    Args:
        tokens: those of all pages, which have the same scale of colors.
        page: its number, from 1.
        kind: what the colors show, `DIFFERENCE` or `MASK`.
        say: translates a text of the page.
    """
    scale = max([MIN_SCALE, *(abs(token.difference) for token in tokens if token.difference is not None)])
    with ui.row().classes("items-center gap-2 text-xs"):
        if kind == MASK:
            legend = [("counts in the loss", _background(BLUE, 1)), ("does not count", "")]
        else:
            legend = [
                (f"{say('engine higher')} ({scale:.2g} nat)", _background(ORANGE, 1)),
                (say("equal"), ""),
                (f"{say('trainer higher')} ({scale:.2g} nat)", _background(BLUE, 1)),
            ]
        for text, style in legend:
            ui.label(say(text)).classes("px-1 rounded").style(style)
    box = ui.element("div").classes("w-full text-sm max-h-96 overflow-auto rounded p-2 bg-gray-100 dark:bg-gray-800")
    with box.style("overflow-wrap: anywhere; font-family: monospace").props('data-testid="tokens"'):
        for token in tokens[(page - 1) * TOKENS_PER_PAGE : page * TOKENS_PER_PAGE]:
            label = ui.label(token.text).classes("inline").style(f"white-space: pre-wrap; {_style(token, kind, scale)}")
            label.props["title"] = _tooltip(token, say)


def _style(token: Token, kind: str, scale: float) -> str:
    if kind == MASK:
        return _background(BLUE, 1) if token.in_loss else ""
    difference = token.difference
    if difference is None:
        return ""
    return _background(BLUE if difference > 0 else ORANGE, abs(difference) / scale)


def _background(color: str, share: float) -> str:
    return f"background: rgba({color}, {MAX_OPACITY * share:.3f})"


def _tooltip(token: Token, say: Callable[[str], str]) -> str:
    if token.difference is None:
        return say("does not count")
    values = {"engine": token.rollout, "trainer": token.trainer, "difference": token.difference}
    lines = [f"{say(name)}: {value:.4f}" for name, value in values.items()]
    return "\n".join([*lines, say("counts in the loss" if token.in_loss else "does not count")])
