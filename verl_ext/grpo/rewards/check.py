"""Checks of the judge, the ground truths and the reward functions of a recipe, before a run starts."""

from __future__ import annotations

import io
import sys
from contextlib import closing, redirect_stderr
from dataclasses import replace
from pathlib import Path
from threading import Timer

from eval_pipeline.judge import JudgeClient, JudgeConfig, ReferenceAnswer, ResourceLimits, ScoredAnswer, Tests
from eval_pipeline.judge.isolation import find_packages
from eval_pipeline.judge.numeric_answer import is_right, parse_number
from eval_pipeline.judge.scorers import require_scorer
from eval_pipeline.problems.verl_rl import (
    needs_one_process,
    read_tests,
    refuse_idle_tests,
    refuse_long_outputs,
    warn_of_divided_tests,
)
from verl_ext.console import print_line, warn
from verl_ext.data.config import PromptDataConfig, file_list
from verl_ext.data.dataset import (
    ANSWER_KEYS,
    ORIGIN_KEY,
    drop_nulls,
    drop_nulls_of_prompt,
    iter_parquet_rows,
    place_of,
    reading_parquet,
)
from verl_ext.errors import UserError
from verl_ext.grpo.config import RewardConfig
from verl_ext.grpo.protocols import RewardError
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.functions import LENGTH_PENALTY, PROGRAM_REWARDS, has_tests, parse_reward_functions
from verl_ext.grpo.rewards.process_pool import START_S, RewardProcessPool
from verl_ext.plugins import Plugin

QUIET_S = 10.0
"""Seconds of loading and calling a function after which a line reports it."""
MAX_SHOWN_CHARACTERS = 60
"""Maximum length of a completion or a ground truth in a message."""


def check_reward_settings(reward: RewardConfig, data: PromptDataConfig) -> None:
    """Refuse unknown reward functions, and a length buffer longer than completions.

    Raises:
        UserError: for the first one, with the fix.
    """
    specs = parse_reward_functions(list(reward.functions))
    # Only length_penalty uses the buffer; other rewards work with completions that are shorter than it.
    penalizes = any(spec.plugin is None and spec.name == LENGTH_PENALTY for spec in specs)
    if penalizes and reward.length_buffer > data.max_response_length:
        raise UserError(
            f"reward.length_buffer is {reward.length_buffer}; it must be at most data.max_response_length, which is "
            f"{data.max_response_length}"
        )


def check_reward_functions(reward: RewardConfig, data: PromptDataConfig) -> None:
    """Refuse data without what a reward needs, and users' functions that fail on the first row.

    Raises:
        UserError: a column is missing or has another type, or a function cannot be loaded or called, or fails.
    """
    specs = parse_reward_functions(list(reward.functions))
    judged = [spec.name for spec in specs if spec.needs_verdict]
    train, val = (
        [Path(name).expanduser() for name in file_list(files)] for files in (data.train_files, data.val_files)
    )
    is_measured = data.eval_every_steps and data.eval_split == "test"
    need_tests = [name for name in judged if name in PROGRAM_REWARDS]
    # rewards that can score the rows without tests
    has_others = any(spec.plugin is not None or spec.name == "reward_correct" for spec in specs)
    runs_tests = [check_columns(path, judged, [] if has_others else need_tests) for path in train]
    for path in val:  # read even if it is not measured
        check_columns(path, judged if is_measured else [], [] if has_others else need_tests)
    answer = trial_answer(train)
    if need_tests and not any(runs_tests):
        refuse_without_tests(need_tests, read_tests(answer.ground_truth, answer.sample_id), answer.sample_id)
    check_ground_truth(judged, answer)
    try_plugins([spec.plugin for spec in specs if spec.plugin is not None], answer, reward.time_limit_s, len(specs))


def check_judge(reward: RewardConfig) -> None:
    """Start the judge once if a reward needs its verdicts.

    Raises:
        UserError: a package is not installed, or the judge's isolation does not work on this machine.
    """
    find_packages(list(reward.packages), "reward.packages")
    if any(spec.needs_verdict for spec in parse_reward_functions(list(reward.functions))):
        config = JudgeConfig(isolation=reward.isolation, num_workers=1, packages=reward.packages)
        with redirect_stderr(io.StringIO()), JudgeClient(config, section="reward"):
            pass  # the ranks warn of a weaker isolation


def check_columns(path: Path, judged: list[str], need_tests: list[str]) -> bool:
    """Refuse a file whose columns `reward_model` and `extra_info` are not structs, or whose rows lack a ground truth.

    Args:
        path: a parquet file.
        judged: the rewards that need the ground truth.
        need_tests: those of them that need tests in every row.

    Returns:
        Whether a row that was checked has tests.

    Raises:
        UserError: a column or a ground truth is missing, or a ground truth cannot be read or has no tests for a reward
            that runs tests.
    """
    import pyarrow
    from pyarrow import parquet

    with reading_parquet(path):
        schema = parquet.read_schema(path)
    for name in {"reward_model", "extra_info"} & {*schema.names}:
        kind = schema.field(name).type
        if not pyarrow.types.is_struct(kind) and not pyarrow.types.is_null(kind):
            raise UserError(f"the column '{name}' of {path} has type {kind}; write a struct, as in verl's RL format")
    if not judged:
        return False
    else_set = "or set reward.functions to rewards that do not need it"
    needs = f"which the reward {judged[0]} needs; add it, {else_set}"
    if "reward_model" not in schema.names or pyarrow.types.is_null(schema.field("reward_model").type):
        if ORIGIN_KEY in schema.names:  # converted from a file of the user
            origin = place_of(str(path), 0, next(iter_parquet_rows(path, [ORIGIN_KEY], batch_size=1)))
            raise UserError(
                f"{origin} has none of the columns {', '.join(ANSWER_KEYS)} and reward_model, one of which the reward "
                f"{judged[0]} needs; add one of them, {else_set}"
            )
        raise UserError(f"{path} has no column 'reward_model' with a ground_truth, {needs}")
    if schema.field("reward_model").type.get_field_index("ground_truth") < 0:
        raise UserError(f"the column 'reward_model' of {path} has no field 'ground_truth', {needs}")
    columns = ["reward_model.ground_truth", *({ORIGIN_KEY} & {*schema.names})]
    rows = iter_parquet_rows(path, columns, batch_size=64)  # tests may be megabytes
    runs_tests, num_divided = False, 0
    for row, record in enumerate(map(drop_nulls, rows)):
        where = place_of(str(path), row, record)
        truth = (record.get("reward_model") or {}).get("ground_truth")
        if truth is None:
            raise UserError(f"{where} has no reward_model.ground_truth, {needs}")
        tests = read_tests(truth, where)
        check_tests(tests, where)
        runs_tests = runs_tests or has_tests(tests)
        refuse_without_tests(need_tests, tests, where)
        num_divided += needs_one_process(tests)
    warn_of_divided_tests(num_divided, str(path))
    return runs_tests


def trial_answer(paths: list[Path]) -> RewardedAnswer:
    """Return an answer to the first row of some files; its `sample_id` names the row.

    The answer is the ground truth if that is a text or a number, because a good completion may be.
    """
    path, row = next(
        (path, drop_nulls_of_prompt(row)) for path in paths for row in iter_parquet_rows(path, batch_size=1)
    )
    unanswered = RewardedAnswer.to_prompt(place_of(str(path), 0, row), row, "", 1)
    truth = unanswered.ground_truth
    text = str(truth) if isinstance(truth, str | int | float) and str(truth).strip() else "This is a completion."
    return replace(unanswered, text=text, num_tokens=len(text.split()))


def check_tests(tests: Tests, where: str) -> None:
    """Refuse a damaged reference answer and tests that cannot judge.

    Raises:
        UserError: the answer cannot be right, every answer passes a test, or none does.
    """
    refuse_idle_tests(tests, where)
    refuse_long_outputs(tests, where, ResourceLimits().output_mb, "drop the row")


def refuse_without_tests(need_tests: list[str], tests: Tests, where: str) -> None:
    """Refuse a ground truth without tests for rewards that run tests.

    Raises:
        UserError: another reward fits the ground truth.
    """
    if not need_tests:
        return
    if isinstance(tests, ScoredAnswer):
        raise UserError(
            f"the reward {need_tests[0]} runs tests, but the ground truth of {where} is an entry of reasoning_gym; set "
            "reward.functions=[reward_correct]"
        )
    if isinstance(tests, ReferenceAnswer):
        raise UserError(
            f"the reward {need_tests[0]} runs tests, but the ground truth of {where} is {abbreviated(tests.answer)}, "
            'which has none; give tests such as {"entry_point": "f", "tests": ["assert f(1) == 2"]}, or score answers '
            f"with reward.functions=[reward_correct] or 'reward.functions=[path.py:function]'; if other rows have "
            f"tests, set reward.functions=[reward_correct,{need_tests[0]}]"
        )


def check_ground_truth(judged: list[str], answer: RewardedAnswer) -> None:
    """Refuse a ground truth for which a reward would be 0 for every completion.

    Args:
        judged: the rewards that need the ground truth.
        answer: an answer to the row to check.

    Raises:
        UserError: the ground truth cannot be read, or is a text that `reward_correct` never finds in a completion.
    """
    where = answer.sample_id
    if "reward_correct" not in judged:
        return
    tests = read_tests(answer.ground_truth, where)
    if isinstance(tests, ScoredAnswer):
        require_scorer(tests.task)
    if not isinstance(tests, ReferenceAnswer):
        return
    truth, shown = tests.answer, abbreviated(tests.answer)
    if not is_right(f"<answer>{truth}</answer>", truth):
        raise UserError(
            f"the reward reward_correct cannot compare completions with the ground truth of {where}, {shown}; set it "
            "to the final answer alone, such as 72, or use your own function, 'reward.functions=[path.py:function]'"
        )
    if parse_number(truth) is None:
        warn(
            f"the ground truth of {where} is {shown}, which is not a number; reward_correct finds such an answer only "
            "inside <answer>...</answer> or \\boxed{...}, after '####' or 'answer is', or alone"
        )


def try_plugins(plugins: list[Plugin], answer: RewardedAnswer, time_limit_s: float, num_functions: int) -> None:
    """Score an answer with the user's functions; warn of each that does not apply to it.

    Args:
        plugins: the user's functions.
        answer: an answer to the row to try.
        time_limit_s: time limit of one call.
        num_functions: number of all reward functions.

    Raises:
        UserError: a function cannot be loaded or called, or fails, or none of several functions applies.
    """
    inapplicable = [plugin for plugin in plugins if try_on_row(plugin, answer, time_limit_s) is None]
    for plugin in inapplicable:
        said = f"the reward function {plugin} returned None for {answer.sample_id}, tried with the completion "
        said += abbreviated(answer.text)
        if len(inapplicable) == num_functions:
            raise UserError(
                f"{said}, and no other function scores it; return a number from one of them, such as 0 for a "
                "completion that it cannot parse"
            )
        warn(f"{said}, so it adds nothing to the reward; for a wrong completion, return 0 instead")


def try_on_row(plugin: Plugin, answer: RewardedAnswer, time_limit_s: float) -> float | None:
    """Score an answer with a user's function within a time limit; print the traceback of a failure.

    Raises:
        UserError: the function cannot be loaded or called, or fails.
    """
    line = f"Loading and trying the reward function {plugin} (load limit: {START_S:g} s) ..."
    waiting = Timer(QUIET_S, print_line, [line])
    waiting.daemon = True
    waiting.start()
    try:
        with closing(RewardProcessPool(plugin, time_limit_s, num_workers=1)) as pool:
            return pool.score(answer)
    except RewardError as error:
        if error.failure.traceback:
            print_line(error.failure.traceback.rstrip(), sys.stderr)
        fix = "return a finite number, such as 0 for a completion that it cannot parse, or None if it does not apply"
        if error.failure.timed_out:
            fix = "make it faster or raise reward.time_limit_s"
        raise UserError(
            f"the reward function {plugin} failed on {answer.sample_id}, tried with the completion "
            f"{abbreviated(answer.text)}: {error}; {fix}"
        ) from error
    finally:
        waiting.cancel()


def abbreviated(text: str) -> str:
    """Quote a text, shortened if it is long."""
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}...")
