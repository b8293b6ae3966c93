"""Samples of a run as rows: files, filters, groups, and columns of the list."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from verl_ext.metrics.jsonl import SAMPLES_FILE, parse_object
from verl_ext.monitor.panels import clip
from verl_ext.monitor.run_files import is_utf8
from verl_ext.monitor.state import PageState

SAMPLES_BYTES = 16 << 20
"""Number of bytes to read from the end of a sample file."""
FIRST_COLUMNS = ("step", "split", "error_type", "reward_total", "pass_ratio", "advantage")
FIRST_TEXTS = ("prompt", "answer")
"""Long columns that come first, before a long `sample_id`."""
SHORT_CHARACTERS = 24
"""Maximum length of values in a short column."""
MAX_SHORT_COLUMNS, MAX_LONG_COLUMNS = 6, 2
IDENTIFIERS = ("step", "attempt", "split", "sample_id", "problem_id", "number", "sample")
"""Columns that together identify a sample within its file."""
REWARDS = ("reward_total", "pass_ratio")
"""Columns with the reward of a sample; the first one that a row has counts."""
MAX_CELL_CHARACTERS = 40

Row = dict[str, Any]


def sample_sources(run_dir: Path) -> dict[str, str]:
    """Return labels of the sample files of a run, by relative path in UTF-8, with the newest evaluation first."""
    found = {SAMPLES_FILE: "training"} if (run_dir / SAMPLES_FILE).is_file() else {}
    paths = (run_dir / "eval").glob("eval_step_*/qa_logs/*_qa.jsonl")
    logs = {path: path.parent.parent.name for path in paths if is_utf8(path.relative_to(run_dir))}
    newest_first = sorted(sorted(logs), key=lambda path: (len(logs[path]), logs[path]), reverse=True)
    for path in newest_first:
        step, dataset = path.parent.parent.name.removeprefix("eval_step_"), path.name.removesuffix("_qa.jsonl")
        found[str(path.relative_to(run_dir))] = f"{dataset} · step {step}"
    return found


def read_samples(path: Path) -> tuple[list[Row], bool]:
    """Return the samples at the end of a file, newest first, and whether there are older ones."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - SAMPLES_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], False
    # the first line may be truncated, and the last one incomplete
    rows = [row for line in lines if (row := parse_object(line)) is not None]
    return rows[::-1], size > SAMPLES_BYTES


# Filters


def reward_of(row: Row) -> float | None:
    """Return the total reward, or the share of passed tests; None if the row has neither."""
    return next((row[name] for name in REWARDS if isinstance(row.get(name), (int, float))), None)


def matches(row: Row, state: PageState) -> bool:
    """Whether a sample passes the filters of the page."""
    reward, low, high = reward_of(row), state.reward_from, state.reward_to
    text = state.search.lower()
    return (
        (state.step is None or row.get("step") == state.step)
        and (not state.split or row.get("split") == state.split)
        and (not state.error or row.get("error_type") == state.error)
        and (low is None or (reward is not None and reward >= low))
        and (high is None or (reward is not None and reward <= high))
        and (not text or any(text in as_text(value).lower() for value in row.values()))
    )


def values_of(rows: Sequence[Row], column: str) -> list[str]:
    """Return the distinct texts of a column, sorted."""
    return sorted({row[column] for row in rows if isinstance(row.get(column), str)})


# Groups


@dataclass(frozen=True)
class Group:
    """Samples of one prompt: completions of a training step by number, or of an evaluation prompt by step.

    Attributes:
        key: its name in the address.
        rows: the samples, oldest first.
    """

    key: str
    rows: Sequence[Row]


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Group samples by prompt, in the order of the newest sample. Of repeated steps, the latest attempt counts.

    Args:
        rows: newest first.
    """
    found: dict[str, dict[object, Row]] = {}
    for row in rows:
        name = as_text(row.get("sample_id", row.get("problem_id")))
        is_evaluation = row.get("split") == "eval" or "step" not in row
        key = name if is_evaluation else f"{row['step']} {name}"
        place = as_text([row.get("step"), row.get("number", row.get("sample"))])
        found.setdefault(key, {}).setdefault(place, row)
    return [Group(key, sorted(members.values(), key=_place)) for key, members in found.items()]


def _place(row: Row) -> tuple[float, float]:
    step, number = row.get("step"), row.get("number", row.get("sample"))
    return tuple(value if isinstance(value, (int, float)) else 0 for value in (step, number))  # type: ignore[return-value]


def group_cells(group: Group) -> Row:
    """Return the row of the list for a group."""
    rewards = [reward for row in group.rows if (reward := reward_of(row)) is not None]
    kinds = Counter(row["error_type"] for row in group.rows if isinstance(row.get("error_type"), str))
    first, last = group.rows[0], group.rows[-1]
    steps = [as_text(row["step"]) for row in (first, last) if "step" in row]
    return {
        "step": "–".join(dict.fromkeys(steps)),
        "split": as_cell(first.get("split")),
        "sample_id": as_cell(first.get("sample_id", first.get("problem_id"))),
        "samples": len(group.rows),
        "mean reward": as_cell(sum(rewards) / len(rewards)) if rewards else None,
        "rewards": as_cell(", ".join(map(as_text, rewards))),
        "error_type": as_cell(", ".join(f"{kind} {count}" for kind, count in kinds.items())),
        "prompt": as_cell(first.get("prompt")),
    }


# Columns and cells


def sample_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of the list: short ones for sorting, then the first long texts."""
    names = dict.fromkeys(name for row in rows for name in row)
    filled = [name for name in names if any(row.get(name) is not None for row in rows)]
    short = [name for name in filled if all(is_short(row.get(name)) for row in rows)]
    ordered = [name for name in FIRST_COLUMNS if name in short]
    ordered += [name for name in short if name not in ordered and name not in ("attempt", "id")]
    long = sorted((name for name in filled if name not in short), key=lambda name: name not in FIRST_TEXTS)
    return ordered[:MAX_SHORT_COLUMNS] + long[:MAX_LONG_COLUMNS]


def key_of_sample(row: Row) -> str:
    """Return the name of a sample in the address; empty if it has no identifier."""
    return " ".join(as_text(row[name]) for name in IDENTIFIERS if row.get(name) not in (None, ""))


def rows_by_key(rows: Sequence[Row]) -> dict[str, Row]:
    """Return samples by a key that newer samples do not change: the name in the address, and a number if it repeats.

    Args:
        rows: newest first, as the result.
    """
    counts: Counter[str] = Counter()
    found = {}
    for row in reversed(rows):
        name = key_of_sample(row)
        counts[name] += 1
        found[f"{name}\0{counts[name]}"] = row
    return dict(reversed(found.items()))


def is_short(value: Any) -> bool:
    """Whether a value of a sample fits into a short column."""
    return not isinstance(value, (dict, list)) and len(as_text(value)) <= SHORT_CHARACTERS


def as_text(value: Any) -> str:
    """Convert a value of a sample to text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def as_cell(value: Any) -> Any:
    """Convert a value for the list, where numbers sort as numbers."""
    if isinstance(value, (bool, int)) or value is None:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 4)
    return clip(as_text(value).replace("\n", " "), MAX_CELL_CHARACTERS)
