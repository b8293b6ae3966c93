"""`python -m verl_ext.controller.calibrate`: fits the latency model on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, get_args

from verl_ext.cli import CommandParser, IntArg, clean_exit, output_file
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary
from verl_ext.controller.config import ControllerConfig, VLMPrecision
from verl_ext.plugins import PLUGIN_FORM, Plugin

if TYPE_CHECKING:
    from verl_ext.controller.adapters import VLMAdapter
    from verl_ext.data.image_questions import ImageQuestion

TEXT = """Fit the latency model on this machine.

Runs random configurations, each on a random question, in several passes and takes the median of each configuration, so
that a slow period of the machine affects all of them equally. Fits the model on four fifths of the configurations and
prints R squared of the total latency on the rest. Also measures how far single runs deviate from the predictions, and
how long a decision of the controller takes. Run it on an idle machine."""
EXAMPLE_INPUTS = "--model data/vqa/model --questions data/vqa/questions --tier-sizes 2304 9216 20736"


def model_parser(name: str, text: str, example: str) -> CommandParser:
    """Build the parser of a command that measures a model, with the arguments of `load_inputs` and `--output`.

    Args:
        name: name of the command's module.
        text: description of the command.
        example: arguments after `EXAMPLE_INPUTS` in the example.
    """
    program = f"python -m verl_ext.controller.{name}"
    parser = CommandParser(prog=program, description=text, examples=[f"{program} {EXAMPLE_INPUTS} {example}"])
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="directory or Hub name of the vision-language model"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model (Molmo needs it)")
    parser.add_argument(
        "--adapter",
        type=partial(Plugin.parse, key="--adapter"),
        metavar="PATH_OR_MODULE:CLASS",
        help=f"your adapter for the model: {PLUGIN_FORM}",
    )
    parser.add_argument(
        "--tier-sizes",
        type=IntArg(),
        nargs="+",
        required=True,
        help="image size of each tier: crops for Molmo, such as 3 6 12, or pixels for Qwen",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(VLMPrecision),
        default=ControllerConfig.dtype,
        help="dtype of the model, as in the run's controller.dtype",
    )
    parser.add_argument("--questions", metavar="FOLDER", required=True, help="folder with train*.parquet")
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        help="folder of the images that questions name by path (default: the folder of --questions)",
    )
    parser.add_argument(
        "--question-suffix",
        metavar="TEXT",
        default="",
        help="text to append to every question, as in the run's data.question_suffix (default: none)",
    )
    parser.add_argument("--num-questions", type=IntArg(), default=32, help="number of questions to measure on")
    parser.add_argument("--output", metavar="FILE", type=output_file, required=True, help="JSON file to write")
    return parser


def load_inputs(arguments: argparse.Namespace) -> tuple[VLMAdapter, list[ImageQuestion]]:
    """Load the model, on a GPU if there is one, and the questions to measure on."""
    from verl_ext.controller.vlm import default_device, load_adapter  # here, as torch takes seconds to import
    from verl_ext.data.config import QuestionSource
    from verl_ext.data.image_questions import ImageQuestionDataset, require_no_placeholders

    device, dtype = default_device(arguments.dtype)
    adapter = load_adapter(
        arguments.model,
        arguments.tier_sizes,
        device=device,
        dtype=dtype,
        trust_remote_code=arguments.trust_remote_code,
        custom_adapter=arguments.adapter,
        section=None,
    )
    source = QuestionSource(arguments.num_questions, 0, arguments.questions, images=arguments.images)
    suffix = arguments.question_suffix
    questions = ImageQuestionDataset({"questions": source}, "train", suffix, progress=True).samples
    require_no_placeholders(questions, adapter.processor)
    return adapter, questions


def build_parser() -> CommandParser:
    """The parser with all options."""
    parser = model_parser("calibrate", TEXT, "--topk-choices 1 2 4 --output latency.json")
    parser.add_argument("--min-active", type=IntArg(), default=1, help="minimum number of active blocks")
    parser.add_argument("--topk-choices", type=IntArg(), nargs="*", default=[], help="numbers of experts, ascending")
    parser.add_argument("--max-new-tokens", type=IntArg(), default=16, help="maximum answer tokens")
    parser.add_argument("--configurations", type=IntArg(10), default=200, help="number of configurations to run")
    parser.add_argument("--repeats", type=IntArg(), default=9, help="runs of each configuration; the median is used")
    parser.add_argument("--hidden", type=IntArg(), default=256, help="width of the controller")
    return parser


@clean_exit()
def main() -> None:
    """Measure, print the quality of the fit, and write the latency model."""
    arguments = build_parser().parse_args()
    from verl_ext.controller.latency import calibrate, warn_of_bad_fit  # here, as torch takes seconds to import

    adapter, questions = load_inputs(arguments)
    space = adapter.space(arguments.min_active, None, arguments.topk_choices, section=None)
    sizes = arguments.configurations, arguments.repeats, arguments.max_new_tokens, arguments.hidden
    model = calibrate(adapter, space, questions, *sizes)
    for part, weights in model.coefficients.items():
        print_line(f"{part}: " + ", ".join(f"{weight:.3g} * {name}" for name, weight in weights.items() if weight))
    print_line(f"R squared on held-out configurations: {model.r2:.4f}")
    ratios = ", ".join(f"{percentile}% within {ratio:.2f}" for percentile, ratio in model.scatter.items())
    print_line(
        f"ratio of single runs to the prediction: {ratios}; a decision by a controller of this width takes "
        f"{model.deciding_ms:.2f} ms"
    )
    model.save(arguments.output)
    path = arguments.output.absolute()
    warn_of_bad_fit(model, path)
    then = (*typed_command("grpo"), 2, "recipe=budget_controller", f"latency.file={path}")
    print_summary(f"Calibrated: {arguments.model}", {"latency model": path}, then)


if __name__ == "__main__":
    main()
