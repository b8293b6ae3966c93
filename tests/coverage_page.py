"""Writes docs/coverage.md from what `coverage combine` has left, as `bash tests/run.sh coverage` does at its end."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.conftest import ROOT
from verl_ext.command_line import FAILURES, CommandParser, clean_exit

PAGE = ROOT / "docs/coverage.md"
REASONS_FILE = ROOT / "tests/assets/coverage_reasons.yaml"
LEAST = 85.0
"""Percent of a module's statements, below which it needs a reason."""
TEXT = """# Coverage

`bash tests/run.sh coverage` runs the unit and the integration tests, counts which statements of `verl_ext` and
`eval_pipeline` they run, and writes this page. It counts in the processes that tests start too: the launcher and its
ranks, evaluations with their workers, vLLM's children, reward functions.

It cannot count in the judge's server and its sandboxes, which get nothing of the environment, so that no answer finds
anything there; nor in a process that is killed, as tests kill many.

The last time, with Python {python}, the tests ran **{share:.1f} %** of {statements} statements. Every module below
{least:.0f} % has a reason, from `tests/assets/coverage_reasons.yaml`:

| module | statements | run | reason |
| --- | --- | --- | --- |
{rows}
"""

Shares = Mapping[str, tuple[int, float]]
"""By module, as its path below the root: its statements, and the percentage of them that ran."""


def reasons() -> dict[str, str]:
    """Why a module may stay below, by its path, or by that of its folder with a slash behind."""
    return yaml.safe_load(REASONS_FILE.read_text())


def reason_for(module: str, known: Mapping[str, str]) -> str:
    """The module's own reason, or its folder's; empty where there is none."""
    return known.get(module) or known.get(f"{Path(module).parent.as_posix()}/", "")


def low(shares: Shares) -> dict[str, tuple[int, float]]:
    """The modules that need a reason, the worst first."""
    found = {module: share for module, share in shares.items() if share[1] < LEAST}
    return dict(sorted(found.items(), key=lambda item: (item[1][1], item[0])))


def render(shares: Shares, known: Mapping[str, str]) -> str:
    """The page."""
    statements = sum(count for count, _ in shares.values())
    run = sum(count * percent for count, percent in shares.values())
    rows = [f"| `{module}` | {n} | {p:.0f} % | {reason_for(module, known)} |" for module, (n, p) in low(shares).items()]
    return TEXT.format(
        python=".".join(platform.python_version_tuple()[:2]),
        share=run / statements,
        statements=statements,
        least=LEAST,
        rows="\n".join(rows),
    )


def measured() -> Shares:
    """What `coverage combine` has left."""
    import coverage  # only here: the page is also read where nothing is measured

    data = coverage.Coverage()
    data.load()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        data.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    summaries = {Path(name).as_posix(): content["summary"] for name, content in files.items()}
    return {name: (each["num_statements"], each["percent_covered"]) for name, each in summaries.items()}


@clean_exit()
def main() -> int:
    """Write the page; 1 where a module has no reason."""
    CommandParser(
        prog="python -m tests.coverage_page",
        description=__doc__ or "",
        examples=["python -m tests.coverage_page"],
        exit_codes={"0": "done", "1": "a module has neither tests enough nor a reason", **FAILURES},
    ).parse_args()
    shares, known = measured(), reasons()
    PAGE.write_text(render(shares, known))
    print(f"{PAGE.relative_to(ROOT)} is written")
    without = [module for module in low(shares) if not reason_for(module, known)]
    for module in without:
        print(f"error: {module} is run to less than {LEAST:.0f} % and has no reason; test it, or say why not in "
              f"{REASONS_FILE.relative_to(ROOT)}", file=sys.stderr)  # fmt: skip
    return int(bool(without))


if __name__ == "__main__":
    sys.exit(main())
