"""What a person watching the terminal sees of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tqdm import tqdm

from verl_ext.console import progress_bar
from verl_ext.errors import UserError
from verl_ext.metrics.epoch_history import line_of
from verl_ext.metrics.event import Event
from verl_ext.metrics.row import Row

_ON_THE_BAR = {"loss": "train/loss", "reward": "train/reward_total_mean", "acc": "train/accuracy_mean"}

MEASURED = "eval/reward_total_mean"
"""In a row of what was measured on prompts that are not learnt from."""
WIDTH = 120
"""Columns that a line may take, where it shows the user's own reward functions."""
_LENGTH, _LATENCY = "seq_completion_len_mean", "latency_ms_mean"


class ConsoleLines:
    """Prints one line every `log_every` steps, at the last step, and for each validation or measurement."""

    name = "console"

    def __init__(self, *, total_steps: int, log_every: int = 10, show: Callable[[str], object] = tqdm.write) -> None:
        """Begin with no step seen.

        Args:
            total_steps: optimizer steps of the whole run.
            log_every: steps between two lines.
            show: takes each line; the default prints it above a progress bar.

        Raises:
            UserError: `log_every` is below 1.
        """
        if log_every < 1:
            raise UserError(f"steps between two console lines must be at least 1, not {log_every}")
        self._total_steps = total_steps
        self._log_every = log_every
        self._show = show
        self._first: Row | None = None

    def write(self, row: Row) -> None:
        """Print the row if its turn has come."""
        if "train/loss" in row.metrics:
            self._first = self._first or row
            if row.step % self._log_every == 0 or row.step == self._total_steps:
                self._show(self._line([*_training_parts(row), self._eta(row)], row))
        if "val/loss" in row.metrics:
            self._show(self._line(_validation_parts(row), row))
        if MEASURED in row.metrics:
            self._show(self._line(_measured_parts(row), row))

    def write_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Print what an epoch came to."""
        self._show(line_of(kind, row))

    def write_event(self, event: Event) -> None:
        """Print what is said of the run."""
        self._show(f"step {event.step}/{self._total_steps} | {event.level}: {event.name}: {event.text}")

    def close(self, exit_code: int = 0) -> None:
        """Nothing is kept open."""

    def _line(self, parts: list[str], row: Row) -> str:
        return " | ".join([f"step {row.step}/{self._total_steps}", *filter(None, parts)])

    def _eta(self, row: Row) -> str:
        # Wall-clock time of this attempt, so that validation and saving are in it; the first step only sets the start.
        if self._first is None or row.step <= self._first.step:
            return ""
        seconds_per_step = (row.time - self._first.time) / (row.step - self._first.step)
        minutes, seconds = divmod(round(seconds_per_step * (self._total_steps - row.step)), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}"


class ProgressBar:
    """A tqdm bar over the steps of a run."""

    def __init__(self, total_steps: int, initial: int = 0) -> None:
        """Draw the bar, on a terminal alone.

        Args:
            total_steps: optimizer steps of the whole run.
            initial: steps done by earlier attempts.
        """
        self._bar = progress_bar(total=total_steps, initial=initial, desc="training", unit="steps")

    def update(self, metrics: Mapping[str, float]) -> None:
        """Move on by one step and show its loss, and reward and accuracy where there are some."""
        shown = {word: f"{metrics[name]:.4f}" for word, name in _ON_THE_BAR.items() if name in metrics}
        try:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        except OSError:  # the terminal was closed; the run is to be saved all the same
            self._bar.disable = True

    def close(self) -> None:
        """Leave the bar as it is and give the line back to the terminal."""
        self._bar.close()


def _training_parts(row: Row) -> list[str]:
    if f"train/{_LATENCY}" in row.metrics:  # the stage budget
        middle = [_part(row, "train/accuracy_mean", "acc {:.3f}"), _part(row, f"train/{_LATENCY}", "latency {:.1f} ms")]
    else:  # without a reference model the KL divergence is that of the step's updates
        kl = "train/kl" if "train/kl" in row.metrics else "train/update_kl"
        middle = [_part(row, f"train/{_LENGTH}", "length {:.0f}"), _part(row, kl, "KL {:z.4f}")]
    return [
        _part(row, "train/loss", "loss {:.4f}"),
        _part(row, "train/reward_total_mean", "reward {:.3f}"),
        *middle,
        _part(row, "train/lr(1e-3)", "lr {:.2e}", scale=1e-3),
        _part(row, "train/grad_norm", "grad norm {:.3f}"),
        _part(row, "throughput/train/tokens_per_s", "{:,.0f} tokens/s"),
    ]


def _validation_parts(row: Row) -> list[str]:
    return [
        _part(row, "val/loss", "val loss {:.4f}"),
        _part(row, "val/perplexity", "val perplexity {:.3f}"),
        _part(row, "time/val/step_s", "{:.1f} s"),
    ]


def _measured_parts(row: Row) -> list[str]:
    """What is measured under `eval/`; of several reward functions as many as fit the line."""
    total, seconds = _part(row, MEASURED, "eval reward {:.3f}"), _part(row, "time/eval/step_s", "{:.1f} s")
    if f"eval/{_LATENCY}" in row.metrics:  # the stage budget
        accuracy = _part(row, "eval/accuracy_mean", "acc {:.3f}")
        latency = _part(row, f"eval/{_LATENCY}", "latency {:.1f} ms")
        return [total, accuracy, latency, _part(row, "eval/budget_violation_mean", "over budget {:.1%}"), seconds]
    length = _part(row, f"eval/{_LENGTH}", "length {:.0f}")
    own = re.compile(r"eval/(?!reward_total_|seq_)(\w+)_mean")
    found = {name[1]: value for key, value in row.metrics.items() if (name := own.fullmatch(key))}
    rewards = [f"{name} {value:.3f}" for name, value in found.items()] if len(found) > 1 else []
    while rewards and len(" | ".join([total, *rewards, length, seconds])) > WIDTH - len("step 10000/10000 | "):
        rewards.pop()
    return [total, *rewards, length, seconds]


def _part(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    return form.format(row.metrics[name] * scale) if name in row.metrics else ""
