"""`problems`: what an evaluation asks and judges becomes prompts that GRPO learns from."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from eval_pipeline.problems.dataset import FORMATS, load_problems
from eval_pipeline.problems.problem import FunctionTests, Problem, ProgramTests, Tests
from eval_pipeline.problems.source import DatasetSource
from eval_pipeline.problems.verl_rl import ground_truth_of
from verl_ext.cli import IntArg
from verl_ext.data.prepare.files import Row, write_parquet
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.errors import UserError
from verl_ext.plugins import PLUGIN_FORM

HELP = "Turn problems in a format of the evaluation (MBPP, CodeContests, HumanEval, GSM8K) into prompts for GRPO."
EXAMPLE = "problems --format mbpp --source google-research-datasets/mbpp --subset full --split train --output data/mbpp"
NEXT = "grpo 2 trainer.experiment_name=mine data.train_files={output}/prompts.parquet"
VERSION = 1
PROMPTS_NAME = "prompts.parquet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `problems`."""
    parser.add_argument("--format", required=True, help=f"{', '.join(FORMATS)}, or one of your own: {PLUGIN_FORM}")
    parser.add_argument("--source", required=True, help="a local file or directory, or a name for `datasets`")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a data set from the hub")
    parser.add_argument("--split", metavar="NAME", help="of a data set that has splits")
    parser.add_argument("--skip", type=IntArg(0), default=0, help="leave out this many problems at the top")
    parser.add_argument("--limit", type=IntArg(), help="take this many problems behind them (default: all)")
    parser.add_argument(
        "--max-tests", type=IntArg(), default=16, help="tests of each problem, from the top; each is run anew"
    )


def run(arguments: argparse.Namespace) -> Prepared:
    """Write `prompts.parquet` in verl's RL format.

    Raises:
        UserError: the problems cannot be loaded.
    """
    kind = arguments.format.rpartition(":")[2]
    name = f"{kind}/{arguments.split}" if arguments.split else kind
    read = None if arguments.limit is None else arguments.skip + arguments.limit
    source = DatasetSource(name, arguments.format, arguments.source, arguments.split, arguments.subset, read)
    problems = load_problems(source)[arguments.skip :]
    if not problems:
        raise UserError(f"--skip {arguments.skip} leaves no problem of {arguments.source}; lower it")
    rows = [to_prompt(problem, name, arguments.max_tests) for problem in problems]
    write_parquet(Path(arguments.output) / PROMPTS_NAME, rows)
    return Prepared([PROMPTS_NAME], {"prompts": len(rows)})


def to_prompt(problem: Problem, data_source: str, max_tests: int) -> Row:
    """One problem as a row."""
    ground_truth = ground_truth_of(_first(problem.tests, max_tests))
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "code" if isinstance(problem.tests, FunctionTests | ProgramTests) else "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"problem_id": problem.problem_id},
    }


def _first(tests: Tests, count: int) -> Tests:
    if isinstance(tests, FunctionTests):
        return replace(tests, tests=tests.tests[:count])
    if isinstance(tests, ProgramTests):
        return replace(tests, cases=tests.cases[:count])
    return tests
