"""`python -m verl_ext.controller.calibrate`: fits the latency model to this machine."""

from __future__ import annotations

from verl_ext.cli import CommandParser, IntArg, clean_exit
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary
from verl_ext.controller.command import EXAMPLE_INPUTS, add_model_arguments

TEXT = """Fit the latency model to this machine.

Runs configurations that are drawn evenly, each for one of the questions, all of them several times over, and takes each
one's median: so a while in which the machine is slow has a part in all of them. Four fifths of them are fitted, and R
squared of the total latency is told for the last fifth, which was not. How far single runs are from what the model says
is told too, and what a controller itself takes. Run it when nothing else runs on the machine."""


def build_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m verl_ext.controller.calibrate",
        description=TEXT,
        examples=[
            f"python -m verl_ext.controller.calibrate {EXAMPLE_INPUTS} --topk-choices 1 2 4 --output latency.json"
        ],
    )
    add_model_arguments(parser)
    parser.add_argument("--min-active", type=IntArg(), default=1, help="fewest blocks that run")
    parser.add_argument("--topk-choices", type=IntArg(), nargs="*", default=[], help="numbers of experts, ascending")
    parser.add_argument("--max-new-tokens", type=IntArg(), default=16, help="of an answer")
    parser.add_argument("--configurations", type=IntArg(10), default=200, help="to run")
    parser.add_argument("--repeats", type=IntArg(), default=9, help="passes over them; the medians count")
    parser.add_argument("--hidden", type=IntArg(), default=256, help="width of the controller")
    return parser


@clean_exit()
def main() -> None:
    """Measure, tell how good the fit is and write it."""
    arguments = build_parser().parse_args()
    from verl_ext.controller.calibration import calibrate, doubts  # here, as torch takes seconds to import
    from verl_ext.controller.measured import adapter_from, questions_from

    adapter, questions = adapter_from(arguments), questions_from(arguments)
    space = adapter.space(arguments.min_active, len(adapter.blocks), arguments.topk_choices)
    sizes = arguments.configurations, arguments.repeats, arguments.max_new_tokens, arguments.hidden
    found = calibrate(adapter, space, questions, *sizes)
    for part, weights in found.coefficients.items():
        print_line(f"{part}: " + ", ".join(f"{weight:.3g} * {name}" for name, weight in weights.items() if weight))
    print_line(f"R squared on configurations that were not fitted: {found.r2:.4f}{doubts(found.r2)}")
    ratios = ", ".join(f"{percentile} % within {ratio:.2f}" for percentile, ratio in found.scatter.items())
    print_line(
        f"single runs take {ratios} times what it says; a controller of this width takes {found.deciding_ms:.2f} ms"
    )
    found.save(arguments.output)
    path = arguments.output.absolute()
    then = (*typed_command("grpo"), 2, "recipe=budget_controller", f"latency.file={path}")
    print_summary(f"Calibrated: {arguments.model}", {"latency model": path}, then)


if __name__ == "__main__":
    main()
