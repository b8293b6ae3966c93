"""`python -m verl_ext.metrics.reference` prints `docs/reference/metrics.md`."""

from __future__ import annotations

from verl_ext.cli import CommandParser, clean_exit
from verl_ext.console import print_line
from verl_ext.metrics.registry import render_metrics_page


@clean_exit()
def main() -> None:
    """Print the page of metrics."""
    parser = CommandParser(
        prog="python -m verl_ext.metrics.reference",
        description="Print the reference page of all metrics as Markdown.",
        examples=["python -m verl_ext.metrics.reference > docs/reference/metrics.md"],
    )
    parser.parse_args()
    print_line(render_metrics_page().removesuffix("\n"))


if __name__ == "__main__":
    main()
