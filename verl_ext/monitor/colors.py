"""Every color of the monitor.

Contrast follows WCAG AA: 4.5 for texts on their background, and 3 for lines and marks. Colors for lines, marks and
badges are used on light and on dark pages; texts have a color for each.
"""

from __future__ import annotations

LIGHT, DARK = ("#ffffff", "#f9fafb"), ("#1d1d1d", "#171717", "#121212")
"""Backgrounds of light and dark pages: cards, headers and logs."""

# Charts

SERIES = ("#3b82f6", "#dc2626", "#059669", "#d97706", "#8b5cf6", "#db2777", "#0d9488", "#5f9a0c", "#64748b", "#ea580c")
GRAY, RED, GREEN = "#6b7280", "#dc2626", "#059669"
ERRORS = {
    "success": GREEN,
    "wrong_answer": "#d97706",
    "syntax_error": RED,
    "runtime_error": "#db2777",
    "timeout": "#8b5cf6",
    "api_error": "#64748b",
}
"""Colors by error type of an answer."""
INK = {False: "#4b5563", True: "#d1d5db"}
"""Color of texts in a chart, by whether the page is dark."""

# Badges, buttons and icons

THEME = {
    "primary": "#2563eb",
    "positive": "#15803d",
    "info": "#2563eb",
    "warning": "#b45309",
    "negative": "#dc2626",
    "neutral": "#6b7280",
}
"""Quasar's names of colors, for badges with white text, icons, buttons and progress bars."""
STATUSES = {
    "running": "positive",
    "finished": "info",
    "waiting": "warning",
    "failed": "negative",
    "stopped": "neutral",
    "killed": "black",
}
LEVELS = {"ok": "positive", "notice": "neutral", "warning": "warning", "alarm": "negative"}
"""Colors by level of a health rule's finding, worst last."""

# Texts

TEXTS = {
    "green": ("#15803d", "#4ade80"),
    "blue": ("#1d4ed8", "#93c5fd"),
    "amber": ("#b45309", "#fbbf24"),
    "red": ("#b91c1c", "#fca5a5"),
    "grey": ("#4b5563", "#d1d5db"),
}
"""Colors of texts on light and on dark pages."""
BLUE, ORANGE, MAX_OPACITY = "37, 99, 235", "217, 119, 6", 0.6
"""Backgrounds of tokens, red, green and blue; people with any color vision can tell them apart."""
FIRST_LAYER = "theme"
"""NiceGUI's first cascade layer: of important declarations, such as Quasar's, those in an earlier layer win."""
PRIMARY_TEXT_STYLE = f"""@layer {FIRST_LAYER} {{
  .body--dark :is(.q-btn--flat, .q-field__control).text-primary {{ color: {TEXTS["blue"][1]} !important }} }}
"""
LINK_STYLE = """a[href]:not(.text-inherit) {{ color: {} }} .body--dark a[href]:not(.text-inherit) {{ color: {} }}
""".format(*TEXTS["blue"])


def text_classes(color: str) -> str:
    """Return the classes of a text in one of `TEXTS`."""
    light, dark = TEXTS[color]
    return f"text-[{light}] dark:text-[{dark}]"
