"""Fits the latency model to this machine.

    python -m verl_ext.controller.calibrate --model DIR --questions FOLDER --output FILE.json

Runs configurations that are drawn evenly, each for one of the questions, all of them several times over, and takes each
one's median: so a while in which the machine is slow has a part in all of them. Four fifths of them are fitted, and R
squared of the total latency is told for the last fifth, which was not. How far single runs are from what the model says
is told too, and what a controller itself takes. Run it when nothing else runs on the machine.
"""

from __future__ import annotations

import argparse

from verl_ext.controller.calibration import calibrate, doubts
from verl_ext.controller.command import adapter_from, add_model_arguments, questions_from
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.tell import tell


@exit_on_user_error()
def main() -> None:
    """Measure, tell how good the fit is and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--min-active", type=int, default=1, help="fewest blocks that run (default 1)")
    parser.add_argument("--topk-choices", type=int, nargs="*", default=[], help="numbers of experts, ascending")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--configurations", type=int, default=200, help="to run (default 200)")
    parser.add_argument("--repeats", type=int, default=9, help="passes over them; the medians count (default 9)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the controller (default 256)")
    arguments = parser.parse_args()
    if arguments.configurations < 10 or arguments.repeats < 1:
        raise UserError("--configurations must be at least 10 and --repeats at least 1")
    adapter, questions = adapter_from(arguments), questions_from(arguments)
    space = adapter.space(arguments.min_active, len(adapter.blocks), arguments.topk_choices)
    sizes = arguments.configurations, arguments.repeats, arguments.max_new_tokens, arguments.hidden
    found = calibrate(adapter, space, questions, *sizes)
    for part, weights in found.coefficients.items():
        tell(f"{part}: " + ", ".join(f"{weight:.3g} * {name}" for name, weight in weights.items() if weight))
    tell(f"R squared on configurations that were not fitted: {found.r2:.4f}{doubts(found.r2)}")
    ratios = ", ".join(f"{percentile} % within {ratio:.2f}" for percentile, ratio in found.scatter.items())
    tell(f"single runs take {ratios} times what it says; a controller of this width takes {found.deciding_ms:.2f} ms")
    found.save(arguments.output)
    tell(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
