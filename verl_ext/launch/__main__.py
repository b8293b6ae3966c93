"""`python -m verl_ext.launch COMMAND NUM_RANKS [recipe=NAME] [key=value ...]`; the run_*.sh scripts call it.

Imports only the standard library until the arguments are parsed, so that --help works before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from verl_ext.cli import CommandParser, IntArg, definitions, is_number
from verl_ext.commands import program, require_package
from verl_ext.config.recipes import default_recipe, recipe_summaries, recipe_variable
from verl_ext.console import print_line
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.metrics.timing import process_start, startup
from verl_ext.paths import CHECKOUT, RECIPES
from verl_ext.processes import StopRequest, StopSignals

COMMANDS = {"sft": "Supervised fine-tuning", "grpo": "Group Relative Policy Optimization"}
EXAMPLES = {"sft": "qwen2.5_coder_7b", "grpo": "qwen2.5_coder_7b_code"}
"""A recipe of each command that needs several GPUs."""
SHOW_SAMPLES = "--show-samples"
EXIT_CODES = {
    "0": "the run is finished",
    "1": "a rank crashed (see its traceback); the same command resumes from the last checkpoint",
    "2": "bad input; the message says how to fix it",
    "3": "stopped by a health rule in health.stop_on after saving a checkpoint; the same command resumes from it",
    "75": "stopped by SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGINT or SIGHUP, or before trainer.preemption.deadline; "
    "rerun to resume",
    "130, 131": "stopped immediately, without saving, by a second Ctrl-C or by SIGQUIT",
}


def main() -> None:
    """Parse the command line, train, and exit with the command's code."""
    # Read by torch at import. By default, a lost connection to another node prints a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with handle_stop_signals() as signals:
        sys.exit(launch(parse_arguments(sys.argv[1:]), signals))


def launch(arguments: argparse.Namespace, signals: StopSignals) -> int:
    """Configure, prepare, check and train; returns the exit code.

    Raises:
        UserError: the input cannot be used.
        StopRequest: a stop signal came before training started.
    """
    startup.begin(process_start())
    with signals.raising():
        from verl_ext.config.provenance import launch_provenance
        from verl_ext.config.schema import to_yaml
        from verl_ext.launch.configure import configure

        config = configure(arguments)
        if arguments.print_config:
            print_line(to_yaml(config), end="")
            return 0
        require_package("verl")
        from verl_ext.launch.preflight import preflight, prepare_inputs
        from verl_ext.launch.run import run_until_finished

        prepare_inputs(config)
        if arguments.show_samples:
            from verl_ext.launch.show_samples import show_samples

            show_samples(config, arguments.show_samples)
            return 0
        preflight(config)
        provenance = launch_provenance(program(arguments.command), arguments.typed)
    return run_until_finished(config, signals, restarts=arguments.restarts, provenance=provenance)


@contextmanager
def handle_stop_signals() -> Iterator[StopSignals]:
    """Handle stop signals; a stop before there is anything to save prints no traceback.

    Raises:
        SystemExit: 2 after a `UserError`, 75 or 131 after a `StopRequest`.
    """
    signals = StopSignals()
    signals.install()
    try:
        with exit_on_user_error():
            yield signals
    except StopRequest as stop:
        print_line(f"Stopped by {stop.signal.name} before training started; run the same command again to train.")
        sys.exit(stop.exit_code)
    finally:
        signals.ignore()


# The command line


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse `STAGE NUM_RANKS [recipe=NAME] [key=value ...]`, with the options anywhere among the words.

    Returns:
        `command`, `num_processes` (None if it is not given), `overrides`, `restarts`, `trace`, `print_config`,
        `show_samples`, and `typed`, all words after the command.

    Raises:
        UserError: a word is unknown or malformed.
    """
    command = words[0] if words and words[0] in COMMANDS else "sft"
    if command != "sft" and any(word.partition("=")[0] == SHOW_SAMPLES for word in words):
        raise UserError(
            f"{SHOW_SAMPLES} is an option of `{program('sft')}` only; look at a GRPO run's samples in samples.jsonl in "
            "its run directory, or in the monitor"
        )
    parser = make_parser(command)
    known = parser.parse_intermixed_args(words)
    known.typed = words[1:]
    known.overrides = known.words
    known.num_processes = take_num_processes(known.overrides, parser, known.command)
    return known


def make_parser(command: str) -> CommandParser:
    """Return the parser of a command, with the text of --help."""
    script, recipes = program(command), recipe_summaries(command)
    folder = "recipes" if CHECKOUT else RECIPES
    of_sft = " [--show-samples N]" if command == "sft" else ""
    parser = CommandParser(
        prog=script,
        usage=f"{script} NUM_RANKS [recipe=NAME] [key=value ...] [--restarts K] [--trace] [--print-config]{of_sft}",
        description=f"{COMMANDS[command]} on NUM_RANKS ranks of this machine (one per GPU, if it has GPUs). The same "
        "command resumes a stopped run from its last checkpoint.",
        examples=[
            f"{script} 2",
            f"{script} 8 recipe={EXAMPLES[command]} optim.lr=1e-5 trainer.experiment_name=low",
            f"NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 {script} 8 --restarts 3",
        ],
        notes=f"recipes in {folder}/{command}/ (default: {default_recipe(command)}, set by {recipe_variable(command)} "
        f"or {folder}/default.yaml):\n{definitions(recipes)}",
        exit_codes=EXIT_CODES,
        keys=partial(suggested_keys, command),
    )
    parser.add_argument("command", choices=sorted(COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument(
        "words", nargs="*", metavar="NUM_RANKS [key=value ...]", help="number of ranks, then Hydra overrides"
    )
    parser.add_argument(
        "--restarts",
        metavar="K",
        type=IntArg(0),
        default=0,
        help="restart the ranks after a crash, with a delay that starts at 5 s and doubles up to 300 s; give up after "
        "K restarts in a row without a new checkpoint; no restart after bad input or a requested stop",
    )
    parser.add_argument(
        "--trace", action="store_true", help="write a timeline of each rank to trace/, as JSON for Perfetto"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    if command == "sft":
        parser.add_argument(
            SHOW_SAMPLES,
            metavar="N",
            type=IntArg(1),
            help="print the first N training samples as the model sees them, with the tokens in the loss marked, and "
            "exit",
        )
    else:
        parser.set_defaults(show_samples=None)
    return parser


def take_num_processes(words: list[str], parser: CommandParser, command: str) -> int | None:
    """Remove the one word without `=` (the number of ranks) from the overrides and return it as a number."""
    plain = [word for word in words if "=" not in word and not word.startswith("~")]
    if not plain:
        return None
    if len(plain) > 1 or not is_number(plain[0], 1):
        wrong = next((word for word in plain if not is_number(word, 1)), plain[-1])
        recipe = wrong.endswith((".yaml", ".yml")) or wrong in recipe_summaries(command)
        problem = f"'{wrong}' is neither the number of ranks nor key=value"
        if recipe:
            parser.error(f"{problem}; did you mean recipe={wrong}?")
        raise UserError(f"{problem}; start with one number of ranks, such as `{program(command)} 2`")
    words.remove(plain[0])
    return int(plain[0])


def suggested_keys(command: str, words: Sequence[str]) -> Collection[str]:
    """The keys of the command's configurations; imported only when a message needs a suggestion."""
    from verl_ext.trainer.stages import known_keys

    return known_keys(command, words)


if __name__ == "__main__":
    main()
