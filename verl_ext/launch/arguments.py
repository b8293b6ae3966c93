"""The command line of a stage. Standard library only, so that --help works before anything is installed."""

from __future__ import annotations

import argparse

from verl_ext.argument_types import WholeNumber
from verl_ext.command_line import CommandParser, definitions
from verl_ext.config.recipes import default_recipe, recipe_summaries

STAGES = {"sft": "Supervised fine-tuning", "grpo": "Group-relative policy optimisation"}
EXIT_CODES = {
    "0": "the run is finished",
    "1": "a rank failed; its traceback stands above, and the same command goes on from the last checkpoint",
    "2": "bad input; the message says how to mend it",
    "3": "stopped by a rule of health.stop_on, with a checkpoint; look before the same command goes on from there",
    "75": "stopped by SIGTERM, SIGUSR1, SIGINT or SIGHUP, or ahead of trainer.preemption.deadline; to be requeued",
    "128 + N": "killed by a second signal N, such as 130 for a second Ctrl-C",
}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse `STAGE NUM_PROCESSES [recipe=NAME] [key=value ...]`, with the options anywhere among the words.

    Returns:
        `stage`, `num_processes` (None when not given), `overrides`, `restarts`, `trace` and `print_config`.

    Raises:
        UserError: a word is unknown or malformed.
    """
    parser = make_parser(words[0] if words and words[0] in STAGES else "sft")
    known, strangers = parser.parse_known_intermixed_args(words)
    if strangers:
        parser.error(f"there is no option {strangers[0]}; settings are given as key=value")
    known.overrides = known.words
    known.num_processes = take_count(known.overrides, parser)
    return known


def make_parser(stage: str) -> CommandParser:
    """What is understood, and what --help says of it."""
    command, recipes = f"bash run_{stage}.sh", recipe_summaries(stage)
    parser = CommandParser(
        prog=command,
        usage=f"{command} NUM_PROCESSES [recipe=NAME] [key=value ...] [--restarts K] [--trace] [--print-config]",
        description=f"{STAGES[stage]} on NUM_PROCESSES ranks of this machine (one per GPU); resumes by itself.",
        examples=[
            f"{command} 2",
            f"{command} 8 recipe={max(recipes)} optim.lr=1e-5 trainer.experiment_name=low",
            f"NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 {command} 8 --restarts 3",
        ],
        notes=f"recipes (recipes/{stage}/; without recipe= it is {default_recipe(stage)}, from recipes/default.yaml):\n"
        + definitions(recipes),
        exit_codes=EXIT_CODES,
    )
    parser.add_argument("stage", choices=sorted(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="NUM_PROCESSES [key=value ...]", help="ranks, then Hydra overrides")
    parser.add_argument(
        "--restarts",
        metavar="K",
        type=WholeNumber(0),
        default=0,
        help="start again by itself after a crash, 5 s later and then twice as long up to 300 s; give up after K "
        "restarts in a row without a new checkpoint; bad input and a stop are never restarted",
    )
    parser.add_argument(
        "--trace", action="store_true", help="write when what happened on each rank to trace/, as JSON for Perfetto"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration alone")
    return parser


def take_count(words: list[str], parser: CommandParser) -> int | None:
    """Remove the one word without `=` (the number of ranks) from the overrides and return it as a number."""
    plain = [word for word in words if "=" not in word and not word.startswith("~")]
    if not plain:
        return None
    if len(plain) > 1 or not plain[0].isdecimal() or int(plain[0]) < 1:
        parser.error(f"'{plain[-1]}' is neither a number of processes (1 or more, given once) nor key=value")
    words.remove(plain[0])
    return int(plain[0])
