"""Every command has its recorded sub-commands, options with their defaults, and exit codes.

`SNAPSHOT_UPDATE=1 bash tests/run.sh unit tests/unit/test_snapshots_commands.py` records them again, and fails.

`tests/data/snapshots/commands.json` has what --help shows, without its prose. Positional arguments are recorded only by
their position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.helpers.snapshots import check_snapshot, exit_codes, run_modules

COMMANDS = (
    *("verl_ext.launch sft", "verl_ext.launch grpo", "verl_ext.checkpoint", "verl_ext.health", "verl_ext.monitor"),
    *("verl_ext.plan", "verl_ext.data.prepare", "verl_ext.controller.calibrate", "verl_ext.controller.importance"),
    *("eval_pipeline", "benchmarks.adaptive", "benchmarks.checkpoint", "benchmarks.evaluation", "benchmarks.gpu_check"),
    *("benchmarks.grpo", "benchmarks.health", "benchmarks.judge", "benchmarks.monitor", "benchmarks.plan"),
    *("benchmarks.quick", "benchmarks.sft", "benchmarks.start"),
)
ENTRY = re.compile(r"^  ([^ ].*?)(?:  +(.*))?$")
"""A line of a section: what is typed, and its text, which may begin on the next line."""
NUMBERS = re.compile(r"[\d. ]+")


def sections_of(page: str) -> dict[str, list[str]]:
    """The lines of --help by their heading, without the colon."""
    sections: dict[str, list[str]] = {"": []}
    for line in page.splitlines():
        if re.fullmatch(r"[A-Za-z][^.`]*:", line):
            sections[line.removesuffix(":")] = []
        else:
            sections[list(sections)[-1]].append(line)
    return sections


def entries_of(lines: list[str]) -> Iterator[tuple[str, str]]:
    """For each entry of a section, its name and its text on one line."""
    typed, text = "", ""
    for line in (*lines, "  end"):
        if found := ENTRY.match(line):
            if typed:
                yield typed, " ".join(text.split())
            typed, text = found[1], found[2] or ""
        else:
            text += f" {line}"


def option_of(typed: str, text: str) -> str:
    """An option's names, its choices or VALUE if it takes one, and `= DEFAULT` unless the default is prose."""
    names = [word.partition(" ")[0] for word in re.split(r", (?=-)", typed)]
    value = typed.rpartition(names[-1])[2].strip()
    shown = value if value.startswith("{") else "VALUE" if value else ""
    found = re.search(r"\(default: ([^()]*)\)", text)
    default = found[1] if found else ""
    choices = re.findall(r"[^\s{},\[\]]+", shown)
    is_prose = " " in default and not NUMBERS.fullmatch(default) and not {*default.split()} <= {*choices}
    return " ".join(filter(None, [*names, shown, "" if is_prose or not found else f"= {default}"]))


def described(page: str) -> dict[str, Any]:
    """The sub-commands, options and arguments of a command."""
    sections = sections_of(page)
    return {
        "options": sorted(option_of(*entry) for entry in entries_of(sections["options"])),
        "arguments": len(list(entries_of(sections.get("positional arguments", [])))),
        "exit codes": [typed for typed, _ in entries_of(sections["exit codes"])],
    }


def test_command_lines_match_record() -> None:
    pages = dict(zip(COMMANDS, run_modules([[*command.split(), "--help"] for command in COMMANDS])))
    parts = [
        f"{command} {name}"
        for command, page in pages.items()
        for name in re.findall(r"^    ([a-z0-9_-]+)(?:  |$)", "\n".join(sections_of(page).get("commands", [])), re.M)
    ]
    pages |= dict(zip(parts, run_modules([[*part.split(), "--help"] for part in parts])))
    check_snapshot("commands.json", {command: described(page) for command, page in pages.items()})


def test_exit_codes_match_record() -> None:
    assert exit_codes() == {"bad input": 2, "health rule": 3, "stop signal": 75}
