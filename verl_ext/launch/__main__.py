"""`python -m verl_ext.launch STAGE NUM_PROCESSES [recipe=NAME] [key=value ...]`; the run_*.sh scripts call it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from verl_ext.commands import require_package
from verl_ext.console import print_line
from verl_ext.errors import exit_on_user_error
from verl_ext.launch.arguments import parse_arguments
from verl_ext.metrics.startup import process_start, startup
from verl_ext.processes import StopRequest, StopSignals


def main() -> int:
    """Parse the command line, and train."""
    return stoppable(lambda signals: launch(parse_arguments(sys.argv[1:]), signals))


def stoppable(command: Callable[[StopSignals], int]) -> int:
    """Run a command that heeds the stop signals, and exit with its code.

    A request to stop before there is anything to save is no error, and leaves no traceback.
    """
    signals = StopSignals()
    signals.install()
    try:
        with exit_on_user_error():
            sys.exit(command(signals))
    except StopRequest as stop:
        print_line(f"Stopped by {stop.signal.name} before training started; run the same command again to train.")
        return stop.exit_code
    finally:
        signals.ignore()


def launch(arguments: argparse.Namespace, signals: StopSignals) -> int:
    """Configure, check, prepare, train, and say what came of it; returns the exit code.

    Raises:
        UserError: the input cannot be used.
        StopRequest: the launcher was asked to stop before it had begun to train.
    """
    startup.begin(process_start())
    with signals.raising():
        # after --help, which needs no packages
        from verl_ext.config.schema import to_yaml
        from verl_ext.launch.configure import check_config, check_inputs, configure

        config = configure(arguments)
        if arguments.print_config:
            print_line(to_yaml(config), end="")
            return 0
        require_package("verl")
        from verl_ext.launch.eval_check import check_evaluation
        from verl_ext.launch.prepare import commands_to_run, output_of, prepare_inputs
        from verl_ext.launch.run import run_to_the_end

        check_config(config)
        commands = commands_to_run(config)
        check_inputs(config, [output_of(command) for command in commands])
        if commands:
            prepare_inputs(commands)
            check_inputs(config)
        check_evaluation(config)
    return run_to_the_end(config, signals, restarts=arguments.restarts)


if __name__ == "__main__":
    sys.exit(main())
