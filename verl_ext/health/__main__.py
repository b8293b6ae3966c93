"""`python -m verl_ext.health RUN_DIR`: is this run well? From its files alone, while it trains or afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from verl_ext.cli import FAILURES, CommandParser, clean_exit
from verl_ext.commands import program
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.health.checklist import Point, checklists, gravest
from verl_ext.health.findings import Finding, Level
from verl_ext.health.own_rules import all_rules
from verl_ext.health.run_files import RunFiles
from verl_ext.plugins import PLUGIN_FORM

MARKS = {Level.OK: "ok     ", Level.NOTICE: "notice ", Level.WARNING: "WARNING", Level.ALARM: "ALARM  "}
UNKNOWN = "-      "


def build_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog=program("health"),
        description="Go through the three checklists of a run and through all health rules, from its files alone.",
        examples=[
            f"{program('health')} checkpoints/rlvr_coding_model/sft_quickstart",
            f"{program('health')} --rules",
        ],
        exit_codes={"0": "no alarm stands", "1": "an alarm stands", **FAILURES},
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="directory of a run, checkpoints/<project>/<experiment>",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    parser.add_argument(
        "--own-rules", action="append", default=[], metavar="PLACE:LIST", help=f"rules of your own too: {PLUGIN_FORM}"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a run.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        1 when an alarm stands, else 0.

    Raises:
        SystemExit: with code 2 after bad input and 75 after a stop, each explained on standard error.
    """
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        rules = all_rules(arguments.own_rules, "--own-rules")
        if arguments.rules:
            print_line("\n".join(f"{each.name:28} {each.meaning}" for each in rules))
            return 0
        if arguments.run_dir is None:
            raise UserError("no run is named; give its directory, checkpoints/<project>/<experiment>")
        files = RunFiles.read(arguments.run_dir, rules)
        lists, findings = checklists(files), list(files.findings().values())
        print_line(as_json(files, lists, findings) if arguments.json else as_text(files, lists, findings))
        worst = max([gravest(chain(*lists.values())), *(each.level for each in findings)])
        return int(worst == Level.ALARM)


def as_text(files: RunFiles, lists: dict[str, list[Point]], findings: Sequence[Finding]) -> str:
    """For people."""
    run = files.run
    lines = [f"{run['project']}/{run['experiment']} ({files.facts.stage}), {run['status']}, step {files.history.step}"]
    for title, points in lists.items():
        lines += ["", title, *(_line(point) for point in points)]
    lines += ["", "Rules"]
    ordered = sorted(findings, key=lambda each: -each.level)
    lines += [f"  {MARKS[each.level]} {each.rule}: {each.sentence}" for each in ordered]
    silent = [
        each.name for each in files.rules if files.facts.stage in each.stages and each.name not in _names(findings)
    ]
    return "\n".join([*lines, *([f"  {UNKNOWN} too little to tell: {', '.join(silent)}"] if silent else [])])


def as_json(files: RunFiles, lists: dict[str, list[Point]], findings: Sequence[Finding]) -> str:
    """For programs."""
    points = {
        title: [
            {"text": each.text, "level": each.seen and each.seen.level.word, "seen": each.seen and each.seen.message}
            for each in listed
        ]
        for title, listed in lists.items()
    }
    rules = [{**asdict(each), "level": each.level.word} for each in findings]
    return json.dumps(
        {"run": dict(files.run), "step": files.history.step, "checklists": points, "rules": rules}, indent=1
    )


def _line(point: Point) -> str:
    if point.seen is None:
        return f"  {UNKNOWN} {point.text}: too little to tell"
    return f"  {MARKS[point.seen.level]} {point.text}: {point.seen.message}"


def _names(findings: Sequence[Finding]) -> set[str]:
    return {each.rule for each in findings}


if __name__ == "__main__":
    sys.exit(main())
