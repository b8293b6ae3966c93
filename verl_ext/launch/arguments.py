"""The command line of a stage. Standard library only, so that --help works before anything is installed."""

from __future__ import annotations

import argparse

from verl_ext.config.recipes import default_recipe, recipe_summaries

STAGES = {"sft": "Supervised fine-tuning"}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse `STAGE NUM_PROCESSES [recipe=NAME] [key=value ...]`.

    Returns:
        `stage`, `num_processes` (None when not given), `overrides` and `print_config`.
    """
    stage = words[0] if words and words[0] in STAGES else "sft"
    parser = argparse.ArgumentParser(
        prog=f"bash run_{stage}.sh",
        usage=f"bash run_{stage}.sh NUM_PROCESSES [recipe=NAME] [key=value ...] [--print-config]",
        description=f"{STAGES[stage]} on NUM_PROCESSES ranks of this machine (one per GPU); resumes by itself.",
        epilog=epilog(stage),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=sorted(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="NUM_PROCESSES [key=value ...]", help="ranks, then Hydra overrides")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and leave")
    known, _ = parser.parse_known_args(words)
    known.overrides = [word for word in words[1:] if word != "--print-config"]
    strangers = [word for word in known.overrides if word.startswith("-")]
    if strangers:
        parser.error(f"there is no option {strangers[0]}; settings are given as key=value")
    known.num_processes = take_count(known.overrides, parser)
    return known


def take_count(words: list[str], parser: argparse.ArgumentParser) -> int | None:
    """Remove the one word without `=` (the number of ranks) from the overrides and return it as a number."""
    plain = [word for word in words if "=" not in word and not word.startswith("~")]
    if not plain:
        return None
    if len(plain) > 1 or not plain[0].isdecimal() or int(plain[0]) < 1:
        parser.error(f"'{plain[-1]}' is neither a number of processes (1 or more, given once) nor key=value")
    words.remove(plain[0])
    return int(plain[0])


def epilog(stage: str) -> str:
    """The recipes there are and an example."""
    lines = [f"  {name:24} {summary}" for name, summary in recipe_summaries(stage).items()]
    return "\n".join(
        [
            f"recipes (recipes/{stage}/; without recipe= it is {default_recipe(stage)}, from recipes/default.yaml):",
            *lines,
            "",
            "examples:",
            f"  bash run_{stage}.sh 2",
            f"  bash run_{stage}.sh 8 recipe=qwen2.5_coder_7b optim.lr=1e-5 trainer.experiment_name=lower_lr",
            f"  NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 bash run_{stage}.sh 8",
            "",
            "exit codes: 0 the run is finished, 2 bad input (the message says how to mend it), 1 a rank failed",
        ]
    )
