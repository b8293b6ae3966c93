"""`python -m verl_ext.launch STAGE NUM_PROCESSES [recipe=NAME] [key=value ...]`; the run_*.sh scripts call it."""

from __future__ import annotations

import sys

from verl_ext.errors import exit_on_user_error
from verl_ext.launch.arguments import parse_arguments


def main() -> int:
    """Parse, configure, check, prepare, train, and say what came of it."""
    arguments = parse_arguments(sys.argv[1:])
    from omegaconf import OmegaConf  # after --help, which needs no packages

    from verl_ext.launch.configure import check_config, configure

    with exit_on_user_error():
        config = configure(arguments)
        if arguments.print_config:
            print(OmegaConf.to_yaml(config), end="")
            return 0
        from verl_ext.launch.prepare import prepare_inputs
        from verl_ext.launch.run import run_to_the_end

        prepare_inputs(config)
        check_config(config)
        return run_to_the_end(config)


if __name__ == "__main__":
    sys.exit(main())
