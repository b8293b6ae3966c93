"""`python -m verl_ext.health RUN_DIR`: checks the health of a run from its files, during or after training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from verl_ext.cli import FAILURES, CommandParser, clean_exit
from verl_ext.commands import program
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.health.checklist import ChecklistItem, MetricTrend, checklists, metric_trends
from verl_ext.health.rule import Finding, Level
from verl_ext.health.rules import load_rules
from verl_ext.health.run_directory import RunDirectory, relies_on_heartbeat
from verl_ext.metrics.heartbeat import await_heartbeat
from verl_ext.plugins import PLUGIN_FORM

MARKS = {Level.OK: "ok     ", Level.NOTICE: "notice ", Level.WARNING: "WARNING", Level.ALARM: "ALARM  "}
UNKNOWN = "-      "
Checklists = Mapping[str, Sequence[ChecklistItem]]


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog=program("health"),
        description="Print the three checklists, the trends and the findings of all health rules for a run, from its "
        "files alone.",
        examples=[
            f"{program('health')} checkpoints/rlvr_coding_model/sft_quickstart",
            f"{program('health')} --rules",
        ],
        exit_codes={"0": "there is no alarm", "1": "there is an alarm", **FAILURES},
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="directory of a run, checkpoints/<project>/<experiment>",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--extra-rules",
        action="append",
        default=[],
        metavar="PATH_OR_MODULE:LIST",
        help=f"add your own rules: {PLUGIN_FORM}",
    )
    parser.add_argument("--rules", action="store_true", help="list the rules")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check the health of a run; returns 1 if there is an alarm, otherwise 0. `clean_exit` has the other exit codes."""
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        rules = load_rules(arguments.extra_rules, "--extra-rules")
        if arguments.rules:
            described = {each.name: each.description for each in rules}
            lines = "\n".join(f"{name:28} {description}" for name, description in described.items())
            print_line(json.dumps(described, indent=1) if arguments.json else lines)
            return 0
        if arguments.run_dir is None:
            raise UserError("no run directory is given; specify one, such as checkpoints/<project>/<experiment>")
        run = RunDirectory.read(arguments.run_dir, rules)
        if relies_on_heartbeat(run.run):
            await_heartbeat(run.path)
        lists, trends, findings = checklists(run), metric_trends(run.view), list(run.findings().values())
        print_line((as_json if arguments.json else as_text)(run, lists, trends, findings))
        levels = [each.result.level for each in chain(*lists.values()) if each.result is not None]
        return int(Level.ALARM in (*levels, *(each.level for each in findings)))


def as_text(run: RunDirectory, lists: Checklists, trends: Sequence[MetricTrend], findings: Sequence[Finding]) -> str:
    """Format the result as text."""
    record = run.run
    lines = [f"{record['project']}/{record['experiment']} ({run.stage}), {run.status}, step {run.history.step}"]
    for title, items in lists.items():
        lines += ["", title, *map(_line, items)]
    lines += ["", "Trends", *(f"  {each.sentence}" for each in trends)]
    lines += [] if trends else [f"  {UNKNOWN} not enough data"]
    lines += ["", "Rules"]
    worst_first = sorted(findings, key=lambda each: -each.level)
    lines += [f"  {MARKS[each.level]} {each.rule}: {each.sentence}" for each in worst_first]
    judged = {each.rule for each in findings}
    silent = [rule.name for rule in run.rules if run.stage in rule.stages and rule.name not in judged]
    lines += [f"  {UNKNOWN} not enough data, or not applicable: {', '.join(silent)}"] if silent else []
    return "\n".join(lines)


def as_json(run: RunDirectory, lists: Checklists, trends: Sequence[MetricTrend], findings: Sequence[Finding]) -> str:
    """Format the result as JSON; `run` is the content of `run.json`."""
    items = {
        title: [
            {
                "text": each.text,
                "level": each.result and each.result.level.word,
                "seen": each.result and each.result.message,
            }
            for each in listed
        ]
        for title, listed in lists.items()
    }
    content = {
        "run": dict(run.run),
        "status": run.status,
        "step": run.history.step,
        "checklists": items,
        "trends": [asdict(each) for each in trends],
        "rules": [{**asdict(each), "level": each.level.word} for each in findings],
    }
    return json.dumps(content, indent=1)


def _line(item: ChecklistItem) -> str:
    if item.result is None:
        return f"  {UNKNOWN} {item.text}: not enough data, or not applicable"
    return f"  {MARKS[item.result.level]} {item.text}: {item.result.message}"


if __name__ == "__main__":
    sys.exit(main())
