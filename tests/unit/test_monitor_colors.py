"""Contrast of the monitor's colors, by the formulas of WCAG 2.2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_ext.monitor import colors
from verl_ext.monitor.colors import DARK, ERRORS, GRAY, GREEN, INK, LIGHT, RED, SERIES, TEXTS, THEME

TEXT, MARK = 4.5, 3.0
"""Minimum contrast of texts, and of lines and marks."""


def luminance(color: str) -> float:
    """Relative luminance of a color `#rrggbb`."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_in_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_color_has_enough_contrast() -> None:
    wanted = [
        *((each, page, MARK) for each in (*SERIES, *ERRORS.values(), *THEME.values(), GRAY, RED, GREEN)
          for page in (*LIGHT, *DARK)),
        *((each, "#ffffff", TEXT) for each in THEME.values()),
        *((each[dark], page, TEXT) for each in TEXTS.values() for dark in (0, 1) for page in (LIGHT, DARK)[dark]),
        *((INK[is_dark], page, TEXT) for is_dark in (False, True) for page in (LIGHT, DARK)[is_dark]),
    ]  # fmt: skip
    low = [(one, other, round(contrast(one, other), 2)) for one, other, least in wanted if contrast(one, other) < least]
    assert low == []
    assert len({*SERIES}) == len(SERIES) == 10


def test_only_one_file_names_colors_of_marks_and_texts() -> None:
    named = re.compile(r"\b(?:text|bg)-(?:red|green|blue|amber|orange)-\d|color=\"(?:red|green|blue|grey)")
    folder = Path(colors.__file__).parent
    assert [path.name for path in folder.glob("*.py") if named.search(path.read_text())] == []
