"""Reward functions that cannot be called or that fail: what the launcher rejects, and what stops a run."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.helpers.grpo import sample
from verl_ext.errors import UserError
from verl_ext.grpo.guards import TIMED_OUT_STEPS, RewardGuard
from verl_ext.grpo.protocols import Reward, RewardError, RewardFailure, Trajectory
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.check import check_reward_functions
from verl_ext.grpo.rewards.custom_process import UserFunction, score_of
from verl_ext.grpo.rewards.text_environment import INAPPLICABLE
from verl_ext.plugins import Plugin
from verl_ext.trainer.stages import GRPOConfig, load_config

FUNCTIONS = """
import asyncio, os, sys, time
def good(data_source, solution_str, ground_truth, extra_info, weight=2.0): return float(ground_truth) * weight
async def asynchronous(ground_truth, **rest):
    await asyncio.sleep(0)
    return float(ground_truth)
kept = []
async def keeps_loop(ground_truth, **rest):  # as clients do
    kept.append(asyncio.get_running_loop())
    kept[0].call_soon(print)
    return float(ground_truth)
async def raises_asynchronously(solution_str, **rest):
    await asyncio.sleep(0)
    if solution_str == "a": await asyncio.wait_for(asyncio.sleep(1), timeout=0)
    sys.exit(1)
def open_ended(**arguments): return arguments["extra_info"]["index"]
def reads_hint(extra_info, **rest): return float(extra_info["hint"] is None)
def sees_truth(solution_str, **rest): return {"72": 1.0}[solution_str]
def raises(data_source, solution_str, ground_truth, extra_info): return helper(solution_str)
def helper(text): raise LookupError("no good")
def text(**rest): return "0.5"
def slow(**rest): time.sleep(100)
def slow_at_first(**rest):
    if not os.path.exists(__file__ + ".called"):
        open(__file__ + ".called", "w").close()
        time.sleep(100)
    return 1.0
def reads_input(**rest): return len(sys.stdin.read())
def leaves(**rest): os._exit(1)
def elsewhere(**rest): return None
def interrupts(**rest): raise KeyboardInterrupt
def raises_wordless(**rest): raise Wordless
class Wordless(Exception):
    def __str__(self): raise RuntimeError
def wrong_names(solution, answer): return 1.0
def one_more(data_source, solution_str, ground_truth, extra_info, more): return 1.0
def by_position(data_source, solution_str, ground_truth, extra_info, /): return 1.0
constant = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (True, 1.0),  # `return answer == reference`
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (torch.tensor(2.0), 2.0),
        (np.array([0.5]), 0.5),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (decimal.Decimal("0.5"), 0.5),
        ({"score": 3, "accuracy": 1}, 3.0),
        (None, None),  # as in TRL, it does not apply
        ({"score": None}, None),
    ],
)
@pytest.mark.filterwarnings("error")  # float() of an array or a tensor with a gradient is deprecated
def test_accepts_numeric_score(value: Any, score: float | None) -> None:
    assert score_of(value) == score


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0.5", "'0.5'"),
        (b"1", "b'1'"),
        ([1.0], "a list"),
        (1j, "a complex"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({"value": 1}, "'score'"),
        ({"score": "1"}, "'1'"),
        (np.array([1.0, 2.0]), "a ndarray"),
        (torch.tensor([1.0, 2.0]), "a Tensor"),
    ],
)
def test_rejects_non_numeric_score(value: Any, shown: str) -> None:
    with pytest.raises(RewardError) as failed:
        score_of(value)
    assert shown in failed.value.failure.reason and not failed.value.failure.traceback


TESTS = '{"entry_point": "f", "tests": ["assert f(1) == 2"]}'
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, f"mine.py:{name} .*{ARGUMENTS}") for name in ("wrong_names", "one_more", "by_position")),
        ("constant", "is not a function"),
        ("god", "has no 'god'"),
    ],
)
def test_rejects_function_that_cannot_be_called(mine: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        UserFunction(Plugin("reward.functions", str(mine), name))


@pytest.mark.parametrize("name", ["asynchronous", "keeps_loop"])
def test_asynchronous_function_gives_its_scores(mine: Path, name: str) -> None:
    answer = RewardedAnswer.to_prompt("1", {"reward_model": {"ground_truth": "7"}}, "7", num_tokens=1)
    with closing(UserFunction(Plugin("reward.functions", str(mine), name))) as function:
        assert [function(answer), function(answer)] == [7, 7]


def test_kind_of_failure_names_line_of_asynchronous_function(mine: Path) -> None:
    first = FUNCTIONS[: FUNCTIONS.index('    if solution_str == "a"')].count("\n") + 1
    with closing(UserFunction(Plugin("reward.functions", str(mine), "raises_asynchronously"))) as function:
        kinds = []
        for text in ("a", "b", "b"):
            with pytest.raises(RewardError) as failed:
                function(RewardedAnswer.to_prompt("1", {}, text, num_tokens=1))
            kinds.append(failed.value.failure.kind)
    assert kinds == [f"TimeoutError in line {first}", *[f"SystemExit in line {first + 1}"] * 2]


def test_rejects_verl_style_function_named_by_module(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    with pytest.raises(UserError, match=r"one argument, a RewardedAnswer.*path\.py:function"):
        UserFunction(Plugin("reward.functions", "mine", "good"))


def test_function_cannot_change_data(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.with_name("changing.py").write_text("def reward(a): return a.extra_info.pop('key') + a.ground_truth.pop()")
    monkeypatch.syspath_prepend(mine.parent)
    row = {"extra_info": {"key": 3}, "reward_model": {"ground_truth": [4]}}
    with closing(UserFunction(Plugin("reward.functions", "changing", "reward"))) as function:
        assert [function(RewardedAnswer.to_prompt("1", row, "7", num_tokens=1)) for _ in range(2)] == [7, 7]


def config_of(data: Path, *functions: str) -> GRPOConfig:
    words = [f"reward.functions=[{','.join(functions)}]", "reward.time_limit_s=0.5", "prepare=[]"]
    config = load_config("grpo", [*words, f"data.train_files={data}", f"data.val_files={data}"])
    assert isinstance(config, GRPOConfig)
    return config


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two rows in the format of GSM8K."""
    frame = pd.DataFrame({"prompt": [[{"role": "user", "content": "6 * 12?"}]] * 2, "data_source": ["here"] * 2})
    frame["reward_model"] = [{"style": "rule", "ground_truth": "72"}] * 2
    frame["extra_info"] = [{"index": 3, "hint": hint} for hint in (None, "think")]
    frame.to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def check_rewards_of(config: GRPOConfig) -> None:
    check_reward_functions(config.reward, config.data)


def test_accepts_working_functions(mine: Path, rows: Path) -> None:
    ours = [
        f"{mine}:{name}"
        for name in ("good", "asynchronous", "open_ended", "reads_hint", "sees_truth", "slow_at_first", "reads_input")
    ]
    check_rewards_of(config_of(rows, *ours, "reward_correct", "tag_count_reward"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "LookupError: no good"),
        ("text", "it returned '0.5'"),
        ("slow", "more than 0.5 s.*reward.time_limit_s"),
        ("leaves", "it ended its process"),
        ("interrupts", ": KeyboardInterrupt;"),
        ("raises_wordless", ": Wordless;"),
        ("wrong_names", "has the parameters"),
    ],
)
def test_rejects_functions_that_fail_on_a_row(
    mine: Path, rows: Path, name: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        check_rewards_of(config_of(rows, f"{mine}:{name}"))
    assert "\n" not in str(refused.value)
    shown = capfd.readouterr().err
    assert ('helper(text): raise LookupError("no good")' in shown) == (name == "raises")


def test_one_function_must_apply_to_first_row(mine: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="elsewhere returned None for .*row 0.*no other function"):
        check_rewards_of(config_of(rows, f"{mine}:elsewhere"))
    check_rewards_of(config_of(rows, f"{mine}:elsewhere", f"{mine}:good"))
    assert "elsewhere returned None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("functions", "truths", "refused"),
    [
        (["reward_correct", "code_tests"], ["72", TESTS], None),
        (["code_tests", "MINE:open_ended"], [TESTS, "72"], None),
        (["code_tests", "length_penalty"], [TESTS, "72"], "code_tests runs tests, .*row 1 is '72'"),
        (["reward_correct", "code_tests"], ["72", "73"], "code_tests runs tests, .*row 0 is '72'"),
    ],
)
def test_rewards_that_run_tests_need_another_reward_for_other_rows(
    mine: Path, rows: Path, functions: list[str], truths: list[str], refused: str | None
) -> None:
    pd.read_parquet(rows).assign(reward_model=[{"ground_truth": truth} for truth in truths]).to_parquet(rows)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_rewards_of(config_of(rows, *(each.replace("MINE", str(mine)) for each in functions)))


@pytest.mark.parametrize(("code", "says"), [("import sys; sys.exit(4)", "exits"), ("import os; os._exit(4)", "ended")])
def test_rejects_file_that_ends_its_process(rows: Path, tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "leaves.py").write_text(code)
    with pytest.raises(UserError, match=f"leaves.py.*{says}"):
        check_rewards_of(config_of(rows, f"{tmp_path}/leaves.py:f"))


def test_rejects_file_that_hangs(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.grpo.rewards.process_pool.START_S", 0.2)
    (tmp_path / "hangs.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(UserError, match=r"hangs.py.*more than 0\.2 s"):
        check_rewards_of(config_of(rows, f"{tmp_path}/hangs.py:f"))


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("reward_model", None, "no column 'reward_model'"),
        ("reward_model", [{"style": "rule"}] * 2, "no field 'ground_truth'"),
        ("reward_model", [{"ground_truth": "72"}, None], "row 1 has no reward_model.ground_truth"),
        ("reward_model", [{"ground_truth": "72"}, {"ground_truth": None}], "row 1 has no"),
        ("reward_model", ['{"ground_truth": "72"}'] * 2, r"'reward_model' .* has type \w*string"),
        ("extra_info", ["{}"] * 2, r"'extra_info' .* has type \w*string"),
        ("reward_model", [{"ground_truth": '{"tests": 3}'}] * 2, "cannot read the tests .*row 0"),
        ("reward_model", [{"ground_truth": "72"}, {"ground_truth": '{"tests": ["a'}], "row 1 .*not valid JSON"),
    ],
)
def test_rejects_rows_without_columns_a_reward_needs(
    rows: Path, column: str, values: list[Any] | None, says: str
) -> None:
    frame = pd.read_parquet(rows).drop(columns=column)
    frame = frame if values is None else frame.assign(**{column: values})
    frame.to_parquet(rows)
    with pytest.raises(UserError, match=says):
        check_rewards_of(config_of(rows, "reward_correct"))
    if column == "reward_model" and not isinstance((values or [None])[0], str):  # no other reward needs it
        check_rewards_of(config_of(rows, "reward_format"))


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
def test_rejects_text_column_in_files_that_are_only_read(rows: Path, column: str) -> None:
    text = rows.with_name("text.parquet")
    pd.read_parquet(rows).assign(**{column: ["{}"] * 2}).to_parquet(text)
    config = config_of(rows, "reward_correct")
    config.data.val_files, config.data.eval_every_steps = str(text), 0
    with pytest.raises(UserError, match=rf"'{column}' of .*text.parquet has type \w*string"):
        check_rewards_of(config)
    pd.read_parquet(rows).drop(columns="reward_model").to_parquet(text)
    check_rewards_of(config)  # what is not measured needs no ground truth


@pytest.mark.parametrize(
    ("truth", "reward", "refused", "warned"),
    [
        ("Paris", "code_tests", r"code_tests.*row 0 is 'Paris'.*entry_point.*reward_correct", False),
        ("72", "exec_success", r"exec_success.*row 0 is '72'", False),
        ('{"entry_point": "f", "tests": ["assert f(1) == 2"]}', "code_tests", None, False),
        ("6 * 12 is a product. #### 72", "reward_correct", None, False),
        ("72</answer>", "reward_correct", r"reward_correct.*row 0.*final answer alone", False),
        ("Paris", "reward_correct", None, True),
        ("$1,072.50", "reward_correct", None, False),
    ],
)
def test_rejects_or_warns_about_ground_truths_that_give_zeros(
    rows: Path, truth: str, reward: str, refused: str | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_parquet(rows)
    frame["reward_model"] = [{"ground_truth": truth}] * 2
    frame.to_parquet(rows)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_rewards_of(config_of(rows, reward))
    assert ("<answer>" in capsys.readouterr().err) == warned


def test_warns_of_tests_that_need_one_process(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = "import tempfile\\nassert f(tempfile.mkdtemp())"
    frame = pd.read_parquet(rows)
    frame["reward_model"] = [{"ground_truth": f'{{"entry_point": "f", "tests": ["{test}"]}}'}] * 2
    frame.to_parquet(rows)
    config = config_of(rows, "code_tests")
    config.data.eval_every_steps = 0  # the same rows are its validation set
    check_rewards_of(config)
    assert capsys.readouterr().err.count(f"2 rows of {rows} may fail right answers") == 1


def test_rejected_row_is_reported_with_its_source_file(rows: Path) -> None:
    frame = pd.read_parquet(rows)
    frame["reward_model"] = [{"ground_truth": truth} for truth in ("72", '{"entry_point": "f"')]
    frame.assign(converted_from=["mine.jsonl row 1", "mine.jsonl row 2"]).to_parquet(rows)
    with pytest.raises(UserError, match=r"mine\.jsonl row 2 \(.*rows\.parquet row 1\)"):
        check_rewards_of(config_of(rows, "reward_correct"))


def test_row_of_trial_is_reported_with_its_source_file(mine: Path, rows: Path) -> None:
    pd.read_parquet(rows).assign(converted_from=["mine.jsonl row 1", "mine.jsonl row 2"]).to_parquet(rows)
    with pytest.raises(UserError, match=r"failed on mine\.jsonl row 1 \(.*rows\.parquet row 0\), tried with"):
        check_rewards_of(config_of(rows, f"{mine}:text"))


RAISED = RewardFailure("ValueError: no good", "Traceback: here", kind="ValueError")
TIMED_OUT = RewardFailure("too long", timed_out=True, kind="timeout")


def check(guard: RewardGuard, step: int, failures: Sequence[RewardFailure | None]) -> None:
    """Check a step in which the reward `near` has these failures and `far` never fails."""
    guard.check(step, [rewarded({} if each is None else {"near": each}) for each in failures])


def rewarded(failures: dict[str, RewardFailure]) -> Trajectory:
    trajectory = sample("text", "7")
    trajectory.reward = Reward({"near": 0.0, "far": 1.0}, failures)
    return trajectory


@pytest.fixture
def guard(one_rank: None) -> RewardGuard:
    return RewardGuard(["far", "near"], lambda sample: f"an answer to {sample.prompt.sample_id}", "cpu")


def test_failing_function_is_reported_once(guard: RewardGuard, capsys: pytest.CaptureFixture[str]) -> None:
    check(guard, 1, [None, None])
    for step in (2, 3):
        check(guard, step, [None, RAISED, RAISED])
    shown = capsys.readouterr().err
    assert shown.count("warning") == shown.count("Traceback: here") == 1
    assert "step 2: the reward near failed on 2 of 3 samples" in shown and "an answer to s" in shown


def test_each_cause_of_failure_is_reported_once(guard: RewardGuard, capsys: pytest.CaptureFixture[str]) -> None:
    """A timeout or None, for example in the first evaluation, must not hide a later exception."""
    guard.report("evaluation at step 0", [rewarded({"near": INAPPLICABLE})])
    check(guard, 1, [INAPPLICABLE, RAISED, RAISED, TIMED_OUT, None])
    check(guard, 2, [INAPPLICABLE, RAISED, TIMED_OUT, None])
    first, *lines = capsys.readouterr().err.splitlines()
    assert "failed on 1 of 1 samples (1 None)" in first and first.count("First failure") == 1
    shown = "\n".join(lines)
    assert "step 1: the reward near failed on 4 of 5 samples (2 ValueError, 1 None, 1 timeout)" in shown
    assert shown.count("warning") == shown.count("Traceback: here") == shown.count("too long") == 1
    assert INAPPLICABLE.reason not in shown


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        ([RAISED, RAISED], r"2 samples \(ValueError: no good\)"),
        ([TIMED_OUT, TIMED_OUT, RAISED], r"3 samples \(2 timeout, 1 ValueError; for example, ValueError: no good\)"),
    ],
)
def test_function_failing_on_every_sample_stops_run(
    guard: RewardGuard, failures: list[RewardFailure], says: str
) -> None:
    with pytest.raises(UserError, match=f"step 1: the reward near failed on all {says}"):
        check(guard, 1, failures)


def test_timeouts_stop_run_after_consecutive_steps(guard: RewardGuard) -> None:
    for step in range(1, TIMED_OUT_STEPS):
        check(guard, step, [TIMED_OUT] * 2)
    check(guard, TIMED_OUT_STEPS, [TIMED_OUT, None])  # not in a row
    for step in range(1, TIMED_OUT_STEPS):
        check(guard, step, [TIMED_OUT] * 2)
    with pytest.raises(UserError, match="near timed out on every sample of 3 steps in a row.*time_limit_s"):
        check(guard, 9, [TIMED_OUT] * 2)


def test_evaluation_reports_failures_without_stopping_run(
    guard: RewardGuard, capsys: pytest.CaptureFixture[str]
) -> None:
    guard.report("evaluation at step 0", [rewarded({"near": RAISED})])
    assert "evaluation at step 0: the reward near failed on 1 of 1 samples" in capsys.readouterr().err
