"""Reward functions, and the environment that computes their weighted components."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.problems.verl_rl import read_tests
from tests.helpers import ROOT
from tests.helpers.grpo import MAX_TOKENS, rewards_of, sample
from tests.helpers.grpo import REWARD as DEFAULT_REWARD
from tests.helpers.processes import wait_gone, wait_until
from verl_ext.errors import UserError
from verl_ext.grpo.metrics import MAX_NAME_CHARACTERS, MAX_SOURCES, sample_metrics, source_metrics, source_names
from verl_ext.grpo.protocols import RewardError, Trajectory
from verl_ext.grpo.rewards import process_pool
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.functions import LengthPenalty, parse_reward_functions, reward_format, tag_count_reward
from verl_ext.grpo.rewards.process_pool import RewardProcessPool
from verl_ext.grpo.rewards.text_environment import TextEnvironment
from verl_ext.launch.preflight import check_best_metric
from verl_ext.metrics.registry import lookup_metric
from verl_ext.plugins import Plugin

REWARD = replace(DEFAULT_REWARD, time_limit_s=0.5)
GOOD = "<think>3 + 4</think>\n<answer>7</answer>"
TESTS = json.dumps({"entry_point": "double", "tests": ["assert double(1) == 2", "assert double(2) == 4"]})
CUSTOM = """
import os, time
def score(data_source, solution_str, ground_truth, extra_info):
    print("noise on standard output")
    if solution_str == "raise": raise ValueError("no good")
    if solution_str == "hang": time.sleep(60)
    if solution_str == "die": os._exit(3)
    if solution_str == "none": return None
    if solution_str == "nan": return float("nan")
    if solution_str == "text": return "0.5"
    if solution_str == "types": return len(ground_truth["tests"])
    if solution_str == "mapping": return {"score": 0.25, "more": 1}
    return len(solution_str) + extra_info["index"] + (data_source == "here") + float(ground_truth)
"""


class TextlessPolicy:
    """A policy without metrics of its own."""

    metric_names, count_name = (), "count"

    def sample_metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {}

    def num_decisions(self, trajectory: Trajectory) -> int:
        return 0


def answer(text: str, **changes: Any) -> RewardedAnswer:
    """An answer of four tokens."""
    fields = {"num_tokens": 4, "truncated": False, "data_source": "", "ground_truth": "", "extra_info": {}}
    return RewardedAnswer(sample_id="s", text=text, **{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "format_", "tags"),
    [
        (GOOD, 1, 1),
        (f"\n{GOOD} \n", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        (f"So: {GOOD}", 0, 1),
        (f"{GOOD} Done.", 0, 1),
        ("<answer>7</answer><think>3 + 4</think>", 0, 1),
        ("<think>3 + 4</think>7", 0, 0.5),
        ("<think><think>3</think><answer>7</answer>", 0, 0.75),
        (GOOD + GOOD, 0, 0),
        ("7", 0, 0),
        ("", 0, 0),
    ],
)
def test_format_and_tag_rewards(text: str, format_: float, tags: float) -> None:
    assert (reward_format(answer(text)), tag_count_reward(answer(text))) == (format_, tags)


def test_format_reward_is_fast_on_hostile_text() -> None:
    """The time is linear in the length; a quadratic pattern would take hours on these texts."""
    assert reward_format(answer("<think>" + "<think" * 200_000)) == 0
    assert reward_format(answer("<think>" + "x</think> " * 100_000)) == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1)])
def test_length_penalty_grows_over_buffer(num_tokens: int, expected: float) -> None:
    """The buffer is the last 20 of 100 tokens."""
    assert LengthPenalty(100, 20)(answer("", num_tokens=num_tokens)) == expected
    assert LengthPenalty(100, 20)(answer("", num_tokens=num_tokens, truncated=True)) == -1


def test_read_tests_accepts_three_kinds_of_ground_truth() -> None:
    assert read_tests("72", "s") == ReferenceAnswer("72")
    assert read_tests("x < 3", "s") == ReferenceAnswer("x < 3") and read_tests(0, "s") == ReferenceAnswer("0")
    assert read_tests(json.loads(TESTS), "s") == read_tests(TESTS, "s")
    assert read_tests(TESTS, "s") == FunctionTests("double", ("assert double(1) == 2", "assert double(2) == 4"))
    program = read_tests('{"inputs": ["1\\n", "2\\n"], "outputs": ["1", "4"]}', "s")
    assert program == ProgramTests((ProgramCase("1\n", "1"), ProgramCase("2\n", "4")))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        None,
        ["a"],
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["1"], "outputs": ["1"], "tolerance": "x"}',
        '{"tests": ["x"]}',
        '{"entry_point": "f", "tests": [1]}',
    ],
)
def test_invalid_tests_error_names_sample(text: str) -> None:
    with pytest.raises(UserError, match="sample_7"):
        read_tests(text, "sample_7")


def test_reward_entries_are_parsed(tmp_path: Path) -> None:
    """Entries have names, weights and files."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    entries = ["reward_correct", "reward_format * 0.5", f"{tmp_path}/mine.py:score*-2", f"b={tmp_path}/mine.py:score"]
    wanted = parse_reward_functions(entries)
    assert [(reward.name, reward.weight) for reward in wanted] == [
        ("reward_correct", 1),
        ("reward_format", 0.5),
        ("score", -2),
        ("b", 1),
    ]
    assert wanted[2].plugin is not None and wanted[2].plugin.location == str(tmp_path / "mine.py")


def test_reward_paths_may_contain_signs_of_the_syntax(tmp_path: Path) -> None:
    path = tmp_path / "a=b*2: c" / "mi=ne*.py"
    path.parent.mkdir()
    path.write_text(CUSTOM)
    for entry, name, weight in (
        (f"{path}:score", "score", 1),
        (f"x={path}:score", "x", 1),
        (f" x = {path}:score * .5", "x", 0.5),
    ):
        [spec] = parse_reward_functions([entry])
        assert spec.plugin is not None and spec.plugin.location == str(path)
        assert (spec.name, spec.weight) == (name, weight)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["reward_corect"], "did you mean reward_correct"),
        (["qqq"], "use one of"),
        (["code_tests*much"], "not a number"),
        (["/x/rw.py*2"], r"without a function; write /x/rw\.py:FUNCTION"),
        (["code_tests*nan"], "not a number"),
        (["code_tests", "code_tests*2"], "twice"),
        (["other=nowhere.py:score"], "does not exist"),
        (["nowhere.py:reward_correct"], "or is reserved"),
        (["adv=nowhere.py:score"], "or is reserved"),
        (["a-b=nowhere.py:score"], "not a valid metric name"),
        (["nowhere.py:score"], "does not exist"),
    ],
)
def test_invalid_reward_entries_are_rejected(entries: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_reward_functions(entries)


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TextEnvironment]:
    """An environment with the reward functions that the test requests."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    entries = [entry.replace("TMP", str(tmp_path)) for entry in request.param]
    environment = TextEnvironment(replace(REWARD, functions=list(entries)), MAX_TOKENS, num_ranks_here=1)
    yield environment
    environment.close()


@pytest.mark.parametrize("opened", [["reward_correct", "reward_format*0.5", "tag_count_reward*0.5"]], indirect=True)
def test_gsm8k_rewards_are_weighted_and_ordered(opened: TextEnvironment) -> None:
    """Rewards keep the order of the samples."""
    texts = (GOOD, GOOD.replace("7", "8"), "The answer is 7", "")
    rewards = rewards_of(opened, [sample(text, "7") for text in texts])
    names = ("reward_correct", "reward_format", "tag_count_reward")
    assert [tuple(reward.components[name] for name in names) for reward in rewards] == [
        (1, 0.5, 0.5),
        (0, 0.5, 0.5),
        (1, 0, 0),
        (0, 0, 0),
    ]
    assert [reward.total for reward in rewards] == [2, 1, 1, 0]


@pytest.mark.parametrize("opened", [["reward_format", "tag_count_reward", "TMP/mine.py:score"]], indirect=True)
def test_tag_that_prompt_opens_counts(opened: TextEnvironment) -> None:
    """Users' functions receive the completion alone, as in verl."""
    begun = GOOD.removeprefix("<think>")
    fields = {"ground_truth": "0", "extra_info": {"index": 0}}
    prompts = ("assistant\n<think>\n", "assistant\n", "<think> first\nassistant\n")
    rewards = rewards_of(opened, [sample(begun, **fields, prompt_text=prompt) for prompt in prompts])
    assert [tuple(reward.components.values()) for reward in rewards] == [
        (1, 1, len(begun)),
        (0, 0.75, len(begun)),
        (0, 0.75, len(begun)),
    ]


@pytest.mark.parametrize("opened", [["reward_correct", "code_tests", "TMP/mine.py:score"]], indirect=True)
def test_reward_that_does_not_apply_adds_nothing(opened: TextEnvironment, one_rank: None) -> None:
    """`code_tests` applies to rows with tests, and the user's function returns None."""
    answers = [("none", "none"), ("none", TESTS), ("7", "7")]
    trajectories = [sample(text, truth, extra_info={"index": 3}) for text, truth in answers]
    maths, code, both = rewards_of(opened, trajectories)
    assert maths.components == {"reward_correct": 1} and maths.total == 1
    assert code.components == {"reward_correct": 0, "code_tests": 0}
    assert both.components == {"reward_correct": 1, "score": 11} and not maths.failures | code.failures | both.failures
    for trajectory, reward in zip(trajectories, (maths, code, both)):
        trajectory.reward = reward
    metrics = sample_metrics("train", trajectories, TextlessPolicy(), opened, "cpu")  # type: ignore[arg-type]
    assert [metrics[f"train/{name}_mean"] for name in opened.reward_names] == [2 / 3, 0, 11]
    assert metrics["train/reward_failures"] == metrics["train/samples_without_reward"] == 0


def test_names_of_data_sources_are_safe_unique_and_bounded() -> None:
    assert source_names(["only", "only"]) == {}
    names = source_names(["a/b c,d", "a_b:c.d", "数学", "gsm8k", "gsm8k", "x" * 99])
    assert names == {
        "gsm8k": "gsm8k", "a/b c,d": "a_b_c_d", "a_b:c.d": "a_b_c_d_2", "x" * 99: "x" * MAX_NAME_CHARACTERS,
        "数学": "数学",
    }  # fmt: skip
    many = [str(number) for number in range(50) for _ in range(number + 1)]
    assert [*source_names(many)] == [str(number) for number in range(49, 49 - MAX_SOURCES, -1)]
    for name in names.values():
        assert lookup_metric(f"eval/reward_total_mean_of_{name}").unit == "1"
        check_best_metric(f"eval/reward_correct_mean_of_{name}")


@pytest.mark.parametrize("opened", [["reward_correct", "code_tests", "TMP/mine.py:score"]], indirect=True)
def test_evaluation_is_measured_by_data_source(opened: TextEnvironment, one_rank: None) -> None:
    """A source without tests has no `code_tests`, and samples without a reward do not count."""
    answers = [("7", "7", "maths"), ("none", "7", "maths"), ("none", TESTS, "code"), ("raise", "7", "maths")]
    trajectories = [sample(text, truth, data_source=source, extra_info={"index": 3}) for text, truth, source in answers]
    for trajectory, reward in zip(trajectories, rewards_of(opened, trajectories)):
        trajectory.reward = reward
    metrics = source_metrics(trajectories, {"maths": "maths", "code": "code"}, opened, "cpu")
    assert metrics == {
        "eval/reward_total_mean_of_maths": 6.0,
        "eval/reward_correct_mean_of_maths": 0.5,
        "eval/reward_total_mean_of_code": 0.0,
        "eval/reward_correct_mean_of_code": 0.0,
        "eval/code_tests_mean_of_code": 0.0,
    }
    assert source_metrics(trajectories, {}, opened, "cpu") == {}


@pytest.mark.parametrize("opened", [["code_tests", "TMP/mine.py:score"]], indirect=True)
def test_sample_to_which_no_reward_applies_has_none(opened: TextEnvironment) -> None:
    [reward] = rewards_of(opened, [sample("none", "7")])
    assert reward.total is None and {*reward.failures} == {"code_tests", "score"}


@pytest.mark.parametrize("opened", [["big=TMP/mine.py:score*1e15", "reward_format"]], indirect=True)
def test_reward_beyond_float32_fails(opened: TextEnvironment) -> None:
    small, large = rewards_of(opened, [sample(text, "0", extra_info={"index": 0}) for text in ("x", "xx")])
    assert small.components["big"] == 1e15 and large.components == {"reward_format": 0}
    assert large.failures["big"].reason == "its value 2 times its weight 1e+15 exceeds 1e+15"


@pytest.mark.parametrize("opened", [["code_tests", "exec_success*0.1", "length_penalty"]], indirect=True)
def test_code_rewards_score_tests_execution_and_length(opened: TextEnvironment) -> None:
    """The components are the share of passed tests, execution success and the length penalty."""
    right = "```python\ndef double(x):\n    return 2 * x\n```"
    answers = ((right, 4), ("def double(x): return 2", 90), ("def double(x): return y", 4), ("No.", 100))
    rewards = rewards_of(opened, [sample(text, TESTS, num_tokens) for text, num_tokens in answers])
    assert [tuple(reward.components.values()) for reward in rewards] == [
        (1, 0.1, 0),
        (0.5, 0.1, -0.5),
        (0, 0, 0),
        (0, 0, -1),
    ]
    verdicts = [(reward.texts["error_type"], reward.texts["message"]) for reward in rewards]
    assert [kind for kind, _ in verdicts] == ["success", "wrong_answer", "runtime_error", "syntax_error"]
    assert verdicts[0][1] == "" and "test " in verdicts[1][1] and "'y'" in verdicts[2][1]


@pytest.mark.parametrize("opened", [["code_tests", "exec_success", "tag_count_reward"]], indirect=True)
def test_invalid_tests_only_affect_their_sample(opened: TextEnvironment) -> None:
    answer = "def double(x): return 2 * x\n# <think>"
    good, bad = rewards_of(opened, [sample(answer, ground_truth) for ground_truth in (TESTS, '{"tests": 3}')])
    assert good.components == {"code_tests": 1, "exec_success": 1, "tag_count_reward": 0.25} and good.failures == {}
    assert bad.components == {"tag_count_reward": 0.25} and bad.total is None
    assert {*bad.failures} == {"code_tests", "exec_success"}
    assert "cannot read the tests" in bad.failures["code_tests"].reason
    assert (bad.texts["error_type"], "cannot read" in bad.texts["message"]) == ("api_error", True)
    assert good.finished_at > 0


@pytest.mark.parametrize("opened", [["code_tests"]], indirect=True)
def test_identical_answers_in_batch_are_judged_once(opened: TextEnvironment) -> None:
    """A later batch judges them again."""
    assert opened._judge is not None
    client = opened._judge.client
    for expected in (2, 3):
        answers = [sample("def double(x): return 2 * x", TESTS) for _ in range(5)]
        if expected == 2:
            answers.append(sample("def double(x): return 0", TESTS))
        assert [reward.total for reward in rewards_of(opened, answers)] == [1.0] * 5 + [0.0] * (expected == 2)
        assert client._num_submitted == expected


@pytest.mark.parametrize("opened", [["code_tests", "exec_success"]], indirect=True)
def test_dead_judge_is_replaced(opened: TextEnvironment) -> None:
    """The new judge handles the remaining answers."""
    assert opened._judge is not None
    process = opened._judge.client._process
    waits = []
    for number in range(6):
        waits.append(opened.step(sample(f"def double(x): return 2 * x  # {number}", TESTS)))
        if number == 0:
            waits[0]()
            process.send_signal(signal.SIGSTOP)  # no further verdicts
        if number == 2:
            process.kill()
    rewards = [wait().reward for wait in waits]
    assert [reward and reward.components for reward in rewards] == [{"code_tests": 1, "exec_success": 1}] * 6


@pytest.mark.parametrize("opened", [["code_tests"]], indirect=True)
def test_hung_judge_is_replaced(opened: TextEnvironment) -> None:
    """A rank waits only for a limited time."""
    assert opened._judge is not None
    client = opened._judge.client
    process = client._process
    first = opened.step(sample("def double(x): return 2 * x", TESTS))
    process.send_signal(signal.SIGSTOP)
    client._longest_s = 0.5
    wait_until(lambda: process.poll() is not None)
    client._longest_s = 300.0  # the next server gets its full time
    second = opened.step(sample("def double(x): return 0", TESTS))
    rewards = [wait().reward for wait in (first, second)]
    assert [reward and reward.total for reward in rewards] == [1.0, 0.0]


@pytest.mark.parametrize("opened", [["TMP/mine.py:score*2"]], indirect=True)
def test_failing_custom_reward_affects_only_its_sample(
    opened: TextEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other samples keep their rewards. A call that times out or ends its process is repeated once."""
    texts = ("good", "raise", "hang", "die", "none", "nan", "text", "mapping", "again")
    limits, called, call = set(), [], process_pool._Process.call

    def call_patiently(process: Any, answer: RewardedAnswer, time_limit_s: float) -> float:
        """Only the call that hangs has the short limit, as a busy machine must not cost another one its reward."""
        limits.add(time_limit_s)
        called.append(answer.text)
        return call(process, answer, time_limit_s if answer.text == "hang" else 300)

    monkeypatch.setattr(process_pool._Process, "call", call_patiently)
    answers = [sample(text, "0.5", data_source="here", extra_info={"index": 3}) for text in texts]
    rewards = dict(zip(texts, rewards_of(opened, answers)))
    assert limits == {REWARD.time_limit_s} and sorted(called) == sorted([*texts, "hang", "die"])
    assert {text: reward.total for text, reward in rewards.items()} == {
        **dict.fromkeys(texts),
        "good": 17.0,
        "mapping": 0.5,
        "again": 19.0,
    }
    failures = {text: reward.failures["score"] for text, reward in rewards.items() if reward.failures}
    assert {*failures} == {"raise", "hang", "die", "none", "nan", "text"}
    assert [text for text, failure in failures.items() if failure.timed_out] == ["hang"]
    assert {text: failure.kind for text, failure in failures.items()} == {
        "raise": "ValueError in line 5",
        "hang": "timeout",
        "die": "crash",
        "none": "None",
        "nan": "nan",
        "text": "str",
    }
    assert rewards["raise"].texts["reward_failure"] == "score: ValueError: no good"
    assert rewards["good"].texts["reward_failure"] == ""
    assert failures["raise"].reason == "ValueError: no good"
    assert "mine.py" in failures["raise"].traceback and 'raise ValueError("no good")' in failures["raise"].traceback
    assert "custom_process.py" not in failures["raise"].traceback  # its frames are of no use to the user
    assert "nan" in failures["nan"].reason and "None" in failures["none"].reason and "'0.5'" in failures["text"].reason
    assert not failures["nan"].traceback and "ended its process" in failures["die"].reason


@pytest.mark.parametrize("opened", [["TMP/mine.py:score", "reward_format"]], indirect=True)
def test_missing_rewards_are_counted_by_function(
    opened: TextEnvironment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first timeout is reported at once."""
    release, call = threading.Event(), process_pool._Process.call

    def call_or_wait(process: Any, answer: RewardedAnswer, time_limit_s: float) -> float | None:
        if answer.text == "last":
            release.wait(300)
        return call(process, answer, time_limit_s if answer.text == "hang" else 300)

    monkeypatch.setattr(process_pool._Process, "call", call_or_wait)
    waits = [opened.step(sample(text, "0.5", extra_info={"index": 3})) for text in ("hang", "hang", "good", "last")]
    for wait in waits[:3]:
        wait()
    assert opened.waiting_for() == "score (3 of 4 samples done, 2 timed out)"
    assert capsys.readouterr().err.count("the call is repeated once") == 1
    release.set()
    waits[3]()
    assert opened.waiting_for() == ""
    opened.end_batch()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_killed_idle_process_costs_no_reward(tmp_path: Path, is_noticed: bool) -> None:
    """It is replaced, whether it ends before the next call or during the call."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    pool = RewardProcessPool(Plugin("reward.functions", f"{tmp_path}/mine.py", "score"), 300.0, 1)
    process = pool._idle.get()
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    wait_until(process.has_ended)
    if not is_noticed:
        process.has_ended = lambda: False  # type: ignore[method-assign]
    pool._idle.put(process)
    try:
        assert pool.score(answer("good", ground_truth="0.5", extra_info={"index": 3})) == 7.5
    finally:
        pool.close()


def test_closed_pool_ends_running_call(tmp_path: Path) -> None:
    """A run that stops does not wait for its rewards; the call would take the time limit twice."""
    text = "import pathlib, threading\ndef score(**_):\n    pathlib.Path('STARTED').touch(); threading.Event().wait()\n"
    (tmp_path / "mine.py").write_text(text.replace("STARTED", str(tmp_path / "started")))
    pool = RewardProcessPool(Plugin("reward.functions", f"{tmp_path}/mine.py", "score"), 300.0, 1)
    future = pool.submit(answer("good"))
    wait_until((tmp_path / "started").exists)
    pool.close()
    with pytest.raises(RewardError, match="ended its process"):
        future.result()


def test_unloadable_reward_function_is_rejected(tmp_path: Path) -> None:
    """The error is raised before the run begins."""
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    for name in ("score", "other"):
        with pytest.raises(UserError, match="nothing_of_this_name" if name == "score" else "no 'other'"):
            TextEnvironment(replace(REWARD, functions=[f"{tmp_path}/mine.py:{name}"]), MAX_TOKENS, 1)
        (tmp_path / "mine.py").write_text(CUSTOM)


def test_reward_function_imports_its_neighbor(tmp_path: Path) -> None:
    """An installed module has precedence over a neighbor of the same name."""
    (tmp_path / "neighbor_of_mine.py").write_text("def score(**rest): return 0.5\n")
    (tmp_path / "numpy.py").write_text("raise ValueError\n")
    (tmp_path / "mine.py").write_text("import numpy\nfrom neighbor_of_mine import score\n")
    pool = RewardProcessPool(Plugin("reward.functions", str(tmp_path / "mine.py"), "score"), 5, 1)
    try:
        assert pool.score(answer("good")) == 0.5
    finally:
        pool.close()


def children_of_this_process() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("first", ["reward_correct", "TMP/mine.py:score"])
def test_failed_construction_leaves_no_process(tmp_path: Path, first: str) -> None:
    """The judge and the processes of other functions end, too."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    functions = [first.replace("TMP", str(tmp_path)), f"{tmp_path}/broken.py:score_2"]
    before = children_of_this_process()
    with pytest.raises(UserError, match="nothing_of_this_name"):
        TextEnvironment(replace(REWARD, functions=functions), MAX_TOKENS, 1)
    assert children_of_this_process() <= before


@pytest.mark.parametrize("opened", [["TMP/mine.py:score"]], indirect=True)
def test_close_ends_reward_processes(opened: TextEnvironment) -> None:
    rewards_of(opened, [sample("good", "0.5", extra_info={"index": 3})])
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    ours = [pid for pid in children if b"custom_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert ours
    opened.close()
    assert not [pid for pid in ours if Path(f"/proc/{pid}").exists()]


def test_time_limit_applies_to_partial_reply(tmp_path: Path) -> None:
    """A function can write to the reply pipe, for example if it forks a process that runs an answer."""
    (tmp_path / "mine.py").write_text(
        "import os, time\n"
        "def score(**_):\n"
        "    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'\\0\\0')\n"
        "        except OSError: pass\n"
        "    time.sleep(1000)\n"
    )
    pool = RewardProcessPool(Plugin("reward.functions", f"{tmp_path}/mine.py", "score"), 1.0, 1)
    try:
        with pytest.raises(RewardError, match="it took more than 1 s"):
            pool.submit(RewardedAnswer("s", "", 1, False, "", "", {})).result(timeout=300)
    finally:
        pool.close()


def test_reward_processes_end_with_killed_rank(tmp_path: Path) -> None:
    """This includes processes that the function started."""
    (tmp_path / "mine.py").write_text(
        "import subprocess\ndef score(**_): return subprocess.Popen(['sleep', '1000']).pid\n"
    )
    rank = (
        "import sys, time; from verl_ext.grpo.rewards.process_pool import RewardProcessPool; "
        "from verl_ext.grpo.rewards.answer import RewardedAnswer; from verl_ext.plugins import Plugin; "
        "pool = RewardProcessPool(Plugin('reward.functions', sys.argv[1], 'score'), 60.0, 1); "
        "child = pool.submit(RewardedAnswer('s', '', 1, False, '', '', {})).result(); "
        "print(int(child), flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", rank, str(tmp_path / "mine.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            started = psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()
    wait_gone([started])
