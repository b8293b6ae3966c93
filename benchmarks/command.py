"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.about import about
from verl_ext.cli import CommandParser, output_file
from verl_ext.console import print_line


def bench_parser(
    name: str, doc: str | None, *examples: str, launcher: str = "python", **settings: Any
) -> CommandParser:
    """The parser of a benchmark, with `--output`.

    Args:
        name: of its module.
        doc: of its module: what it measures.
        examples: arguments of typical runs.
        launcher: what starts it.
        settings: others of the parser.
    """
    typed = f"{launcher} -m benchmarks.{name}"
    lines = [f"{typed} {example}".rstrip() for example in examples]
    parser = CommandParser(prog=typed, description=doc or "", examples=lines, **settings)
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the figures to this JSON file")
    return parser


def write_figures(figures: dict[str, Any], path: Path | None) -> None:
    """Write the figures where the command line says, and tell it."""
    save_figures(figures, path)
    if path is not None:
        print_line(f"wrote {path}")


def save_figures(figures: dict[str, Any], path: Path | None) -> None:
    """Write the figures with the date, the machine and the versions, where the command line says."""
    if path is not None:
        head = about("torch", "transformers")
        versions = {**head["versions"], **figures.get("versions", {})}
        path.write_text(json.dumps({**head, **figures, "versions": versions}, indent=1) + "\n")
