"""Arguments that the commands which measure a model have in common: which model, which questions, where to."""

from __future__ import annotations

from verl_ext.cli import CommandParser, IntArg, output_file
from verl_ext.plugins import PLUGIN_FORM

EXAMPLE_INPUTS = "--model data/vqa/model --questions data/vqa/questions --tier-sizes 2304 9216 20736"


def add_model_arguments(parser: CommandParser) -> None:
    """Add the arguments that `measured.py` reads, and `--output`."""
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="directory or hub name of the vision-language model"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the model brings (Molmo)")
    parser.add_argument("--adapter", metavar="PLACE:CLASS", help=f"an adapter of your own for the model: {PLUGIN_FORM}")
    parser.add_argument(
        "--tier-sizes",
        type=IntArg(),
        nargs="+",
        required=True,
        help="what each tier shows of an image: crops for Molmo, such as 3 6 12; pixels for Qwen",
    )
    parser.add_argument("--questions", metavar="FOLDER", required=True, help="folder with train*.parquet")
    parser.add_argument("--num-questions", type=IntArg(), default=32, help="questions to measure on")
    parser.add_argument("--output", metavar="FILE", type=output_file, required=True, help="JSON file to write")
