"""Keyboard shortcuts of the page, and the dialog that lists them."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui

from verl_ext.monitor.colors import FIRST_LAYER, THEME
from verl_ext.monitor.panels import heading, tag
from verl_ext.monitor.state import TABS

SHORTCUTS = {
    "/": "Search or filter",
    "[ ]": "Previous or next run",
    f"1 – {len(TABS)}": "Open a tab",
    "↑ ↓": "Previous or next row of the focused table",
    "?": "Show the keyboard shortcuts",
}
SCRIPT = """
addEventListener('keydown', event => {
  const target = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest('input, textarea, [contenteditable]')) return;
  const table = target.closest('.q-table__container[tabindex]');
  if (table && (event.key === 'ArrowDown' || event.key === 'ArrowUp')) {
    const rows = [...table.querySelectorAll('tbody tr')], last = rows.findIndex(row => row.matches('.selected'));
    const row = rows[last < 0 ? 0 : last + (event.key === 'ArrowDown' ? 1 : -1)];
    if (row) { row.click(); row.scrollIntoView({block: 'nearest'}); }
    event.preventDefault();
  } else if (event.key === '/') {
    const boxes = document.querySelectorAll('input[data-testid$="search"], input[data-testid="filter"]');
    [...boxes].find(box => box.offsetParent)?.focus();
    event.preventDefault();
  } else if (/^[\\[\\]?1-9]$/.test(event.key)) emitEvent('shortcut', event.key);
});
"""
FOCUS_STYLE = f"""@layer {FIRST_LAYER} {{
  :focus-visible:not(.q-field__native, .q-field__input, .q-select__focus-target) {{
    outline: 2px solid {THEME["primary"]} !important; outline-offset: 2px !important }}
}}"""


class ShortcutHelp:
    """A button, and the dialog with the shortcuts that it opens."""

    def __init__(self, say: Callable[[str], str]) -> None:
        with ui.dialog() as self._dialog, tag(ui.card(), "shortcuts"):
            heading(say("Keyboard shortcuts"), "text-lg font-medium", level=2)
            with ui.element("div").classes("grid grid-cols-[auto_1fr] gap-x-6 gap-y-2"):
                for keys, text in SHORTCUTS.items():
                    ui.label(keys).classes("font-mono font-medium")
                    ui.label(say(text))
        button = ui.button(icon="keyboard", on_click=self.toggle).props("flat dense")
        tag(button, "help", **{"aria-label": say("Keyboard shortcuts")})

    def toggle(self) -> None:
        """Open the dialog, or close it."""
        self._dialog.set_value(not self._dialog.value)
