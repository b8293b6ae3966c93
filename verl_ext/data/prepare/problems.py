"""`problems`: converts evaluation problems to prompts for GRPO."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.cli import IntArg
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.tables import Row, rl_prompt_row, write_parquet
from verl_ext.errors import UserError
from verl_ext.plugins import PLUGIN_FORM

if TYPE_CHECKING:
    from eval_pipeline.problems.problem import Problem

PROMPTS_NAME = "prompts.parquet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `problems`."""
    from eval_pipeline.problems.datasets import FORMATS

    parser.add_argument("--format", required=True, help=f"{', '.join(FORMATS)}, or your own: {PLUGIN_FORM}")
    parser.add_argument("--source", required=True, help="a local file or directory, or a dataset on the Hub")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a dataset on the Hub")
    parser.add_argument("--split", metavar="NAME", help="split of a dataset that has splits")
    parser.add_argument("--skip", type=IntArg(0), default=0, help="number of problems to skip at the beginning")
    parser.add_argument("--limit", type=IntArg(), help="number of problems after the skipped ones (default: all)")
    parser.add_argument(
        "--max-tests", type=IntArg(), default=16, help="maximum number of tests per problem; keeps the first ones"
    )


def prepare_problems(arguments: argparse.Namespace) -> PrepareResult:
    """Write `prompts.parquet` in verl's RL format.

    Raises:
        UserError: the problems cannot be loaded.
    """
    from eval_pipeline.problems.datasets import load_problems
    from eval_pipeline.problems.problem import DatasetSource

    kind = arguments.format.rpartition(":")[2]
    name = f"{kind}/{arguments.split}" if arguments.split else kind
    limit = None if arguments.limit is None else arguments.skip + arguments.limit
    source = DatasetSource(name, arguments.format, arguments.source, arguments.split, arguments.subset, limit)
    problems = load_problems(source)[arguments.skip :]
    if not problems:
        raise UserError(f"--skip {arguments.skip} leaves no problem of {arguments.source}; lower it")
    rows = [_to_rl_row(problem, name, arguments.max_tests) for problem in problems]
    write_parquet(Path(arguments.output) / PROMPTS_NAME, rows)
    reward = "reward_correct" if any(row["ability"] == "math" for row in rows) else "code_tests"
    return PrepareResult([PROMPTS_NAME], {"prompts": len(rows)}, {"reward": reward})


def _to_rl_row(problem: Problem, data_source: str, max_tests: int) -> Row:
    from eval_pipeline.judge import FunctionTests, ProgramTests
    from eval_pipeline.problems.verl_rl import ground_truth_of

    tests, ability = problem.tests, "code"
    if isinstance(tests, FunctionTests):
        tests = replace(tests, tests=tests.tests[:max_tests])
    elif isinstance(tests, ProgramTests):
        tests = replace(tests, cases=tests.cases[:max_tests])
    else:
        ability = "math"
    info = {"problem_id": problem.problem_id}
    row = rl_prompt_row(data_source, problem.prompt, ability, ground_truth_of(tests), info)
    earlier = [{"role": role, "content": text} for role, text in problem.earlier]
    return {**row, "prompt": [*earlier, *row["prompt"]]}


COMMAND = PrepareCommand(
    name="problems",
    help="Convert problems in an evaluation format (MBPP, CodeContests, HumanEval, GSM8K, MATH) to GRPO prompts.",
    example=(
        "problems --format mbpp --source google-research-datasets/mbpp --subset full --split train --output data/mbpp"
    ),
    next_command=(
        "grpo 2 recipe=custom model.partial_pretrain=MODEL reward.functions=[{reward}] trainer.experiment_name=mine "
        f"data.train_files={{output}}/{PROMPTS_NAME} data.val_files=null data.eval_split=train "
        "data.max_prompt_length=1024 data.max_response_length=1024"
    ),
    version=2,
    add_arguments=add_arguments,
    run=prepare_problems,
)
