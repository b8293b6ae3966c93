"""Where a run stands: status, progress, time left, and the latest figures."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from nicegui import ui

from verl_ext.monitor.page.context import STATUS_COLOURS, PageContext
from verl_ext.monitor.view import RunView

SPEEDS = {
    "throughput/train/samples_per_s": "samples/s",
    "throughput/train/valid_tokens_per_s": "tokens/s",
    "throughput/train/configs_per_s": "configurations/s",
}


class StatusPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        with ui.row().classes("w-full items-center gap-2"):
            self._run = ui.label().classes("sr-only").props('data-testid="shown"')  # for those who hear the page
            self._status = ui.badge().props('data-testid="status"')
            self._mode = ui.badge(color="grey-6").props('data-testid="mode"')
            self._reason = ui.label().classes("text-sm opacity-70").props('data-testid="reason"')
        self._bar = ui.linear_progress(show_value=False, size="10px").props('data-testid="progress"')
        self._figures: dict[str, ui.label] = {}
        with ui.row().classes("w-full gap-3"):
            for name in ("Current step", "Total steps", "Progress", "Time left", "Loss now", "Learning rate", "Speed"):
                with ui.card().tight().classes("px-4 py-2 min-w-32"):
                    ui.label(context.say(name)).classes("text-xs opacity-70")
                    self._figures[name] = ui.label("-").classes("text-xl").props(f'data-testid="figure {name}"')

    def show(self, view: RunView) -> None:
        """Show a run as it stands now."""
        say, standing, status = self._context.say, view.standing(), view.record["status"]
        self._run.set_text(view.record["path"])
        self._status.set_text(say(status))
        self._status.props(f"color={STATUS_COLOURS[status]}")
        self._mode.set_text(say("Live" if status == "running" else "History"))
        self._reason.set_text(self._told(view))
        share = standing.step / standing.total_steps if standing.total_steps else 0.0
        self._bar.set_value(min(share, 1.0))
        left = standing.seconds_left
        told = {
            "Current step": f"{standing.step:,}",
            "Total steps": f"{standing.total_steps:,}" if standing.total_steps else "-",
            "Progress": f"{share:.1%}",
            "Time left": "-" if left is None else str(timedelta(seconds=round(left))),
            "Loss now": _figure(standing.latest.get("train/loss")),
            "Learning rate": _figure(standing.latest.get("train/lr(1e-3)"), 1e-3),
            "Speed": self._speed(standing.latest),
        }
        for name, text in told.items():
            self._figures[name].set_text(text)

    def _told(self, view: RunView) -> str:
        """How the last attempt ended, and what of the run's file could not be read."""
        attempt, lost = view.last_attempt(), view.record["unreadable"]
        parts = [attempt["exit_reason"]] if attempt is not None and attempt["exit_reason"] else []
        parts += [f"{lost} {self._context.say('unreadable lines of metrics.jsonl')}"] if lost else []
        return " · ".join(parts)

    def _speed(self, latest: Mapping[str, float]) -> str:
        name = next((each for each in SPEEDS if each in latest), None)
        return "-" if name is None else f"{latest[name]:,.1f} {self._context.say(SPEEDS[name])}"


def _figure(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.4g}"
