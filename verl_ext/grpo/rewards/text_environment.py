"""The environment of single-turn texts: every reward function of the recipe scores every answer."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from eval_pipeline.judge import JudgeClient, JudgeConfig, ResourceLimits, Submission, Verdict
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.verl_rl import read_tests
from verl_ext.grpo.config import RewardConfig
from verl_ext.grpo.protocols import Environment, Reward, RewardError, RewardFailure, StepResult, Trajectory
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.custom_process import UserFunction
from verl_ext.grpo.rewards.functions import (
    LENGTH_PENALTY,
    PROGRAM_REWARDS,
    TEXT_REWARDS,
    VERDICT_REWARDS,
    LengthPenalty,
    RewardSpec,
    has_tests,
    opened_by,
    parse_reward_functions,
)
from verl_ext.grpo.rewards.process_pool import RewardProcessPool

MAX_REWARD = 1e15
"""Largest absolute value of a weighted reward; larger ones leave float64 too few digits for advantages."""
MAX_REFERENCE_CHARACTERS = 2000
"""Maximum length of a reference in the sample table; the tests of a program can be much longer."""
INAPPLICABLE = RewardFailure("it does not apply (None), and neither does any other reward function", kind="None")
"""Failure of every reward function if none of them applies to a sample."""
FAILURE = "reward_failure"
"""Column of the sample table with the reasons of failed reward functions, for recipes with users' functions."""
VERDICT = "verdict"
"""Key of the future that all rewards from the judge's verdict share."""


class TextEnvironment(Environment):
    """Rewards completions; if a function fails, only its sample has no reward."""

    def __init__(self, reward: RewardConfig, max_tokens: int, num_ranks_here: int) -> None:
        """Start the judge and the processes that the functions need.

        Args:
            reward: the functions, their weights and their limits.
            max_tokens: longest answer, see `LengthPenalty`.
            num_ranks_here: number of ranks on this machine, which share its processors.

        Raises:
            UserError: a function cannot be loaded, or the judge's isolation does not work here.
        """
        self._specs = parse_reward_functions(reward.functions)
        self._batch: defaultdict[str, list[Future[Any]]] = defaultdict(list)
        self.reward_names = [spec.name for spec in self._specs]
        num_workers = reward.num_workers or max(len(os.sched_getaffinity(0)) // num_ranks_here, 1)
        with ExitStack() as started:  # closed if a later function cannot be loaded
            self._judge: JudgeReward | None = None
            if any(spec.needs_verdict for spec in self._specs):
                self._judge = JudgeReward(started.enter_context(_judge_client(reward, num_workers)))
            self._submit: dict[str, Callable[[RewardedAnswer], Future[float | None]]] = {
                spec.name: _submitter(spec, reward, max_tokens, num_workers, started)
                for spec in self._specs
                if not spec.needs_verdict
            }
            self._started = started.pop_all()

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """Start to score the answer with all reward functions."""
        prompt, completion = trajectory.prompt, trajectory.action
        answer = RewardedAnswer.to_prompt(
            prompt.sample_id, prompt.fields, completion.text, len(completion.token_ids), completion.truncated
        )
        opened = opened_by(str(prompt.fields.get("prompt_text", "")))
        futures: dict[str, Future[Any]] = {
            name: submit(replace(answer, text=f"{opened}{answer.text}") if name in TEXT_REWARDS else answer)
            for name, submit in self._submit.items()
        }
        specs = self._specs
        if self._judge is not None:
            futures[VERDICT], runs_tests = self._judge.submit(answer)
            specs = [spec for spec in specs if runs_tests or spec.name not in PROGRAM_REWARDS]
        finished_at: list[float] = []
        for name, future in futures.items():
            self._batch[name].append(future)
            future.add_done_callback(lambda _: finished_at.append(time.perf_counter()))
        return partial(self._wait, specs, futures, finished_at, _texts(answer))

    def waiting_for(self) -> str:
        parts = []
        for name, futures in self._batch.items():
            done = [future for future in futures if future.done()]
            if len(done) < len(futures):
                timed_out = sum(has_timed_out(future) for future in done)
                also = f", {timed_out} timed out" if timed_out else ""
                shown = "the judge" if name == VERDICT else name
                parts.append(f"{shown} ({len(done)} of {len(futures)} samples done{also})")
        return ", ".join(parts)

    def end_batch(self) -> None:
        self._batch = defaultdict(list)
        if self._judge is not None:
            self._judge.forget()

    def close(self) -> None:
        self._started.close()

    def _wait(
        self,
        specs: Sequence[RewardSpec],
        futures: dict[str, Future[Any]],
        finished_at: list[float],
        texts: dict[str, str],
    ) -> StepResult:
        components: dict[str, float] = {}
        failures: dict[str, RewardFailure] = {}
        for spec in specs:
            try:
                if spec.needs_verdict:
                    value = VERDICT_REWARDS[spec.name](verdict_of(futures[VERDICT]))
                else:
                    value = futures[spec.name].result()
                if value is not None:
                    components[spec.name] = _weighted(spec.weight, value)
            except RewardError as error:
                failures[spec.name] = error.failure
            except Exception as error:  # the sample has no reward, and the failure is reported
                failures[spec.name] = RewardFailure(f"{error}" or type(error).__name__, kind=type(error).__name__)
        if not components and not failures:
            failures = dict.fromkeys(self.reward_names, INAPPLICABLE)
        if VERDICT in futures:
            texts = texts | _verdict_texts(futures[VERDICT])
        if any(spec.plugin is not None for spec in self._specs):
            texts = texts | {FAILURE: "; ".join(f"{name}: {failure.reason}" for name, failure in failures.items())}
        done = max(finished_at, default=0.0)
        return StepResult(reward=Reward(components, failures, texts=texts, finished_at=done))


def has_timed_out(done: Future[Any]) -> bool:
    """Whether a call failed because it exceeded its time limit."""
    error = done.exception()
    return isinstance(error, RewardError) and error.failure.timed_out


def _weighted(weight: float, value: float) -> float:
    if not abs(weight * value) <= MAX_REWARD:
        reason = f"its value {value:.3g} times its weight {weight:g} exceeds {MAX_REWARD:g}"
        raise RewardError(RewardFailure(reason, kind="too large"))
    return weight * value


def _texts(answer: RewardedAnswer) -> dict[str, str]:
    """Columns of the sample table that belong to the row of the data."""
    truth = answer.ground_truth
    text = truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth, default=str)
    return {"reference": text[:MAX_REFERENCE_CHARACTERS]}


def _verdict_texts(verdict: Future[Verdict]) -> dict[str, str]:
    """Columns of the sample table that say what the judge found, such as the test that failed."""
    if error := verdict.exception():
        return {"error_type": "api_error", "message": f"{error}"[:MAX_REFERENCE_CHARACTERS]}
    return {"error_type": verdict.result().error_type, "message": verdict.result().message}


def _judge_client(reward: RewardConfig, num_workers: int) -> JudgeClient:
    limits = ResourceLimits(cpu_s=reward.cpu_s, wall_s=reward.wall_s, memory_mb=reward.memory_mb)
    config = JudgeConfig(isolation=reward.isolation, num_workers=num_workers, packages=reward.packages, limits=limits)
    return JudgeClient(config, section="reward")


def _submitter(
    spec: RewardSpec, reward: RewardConfig, max_tokens: int, num_workers: int, started: ExitStack
) -> Callable[[RewardedAnswer], Future[float | None]]:
    """Return a function that scores answers without the judge, in other processes or at once."""
    if spec.plugin is not None and spec.plugin.is_file:
        pool = RewardProcessPool(spec.plugin, reward.time_limit_s, num_workers)
        started.callback(pool.close)
        return pool.submit
    if spec.plugin is not None:
        return partial(_score_now, started.enter_context(closing(UserFunction(spec.plugin))))
    if spec.name == LENGTH_PENALTY:
        return partial(_score_now, LengthPenalty(max_tokens, reward.length_buffer))
    return partial(_score_now, TEXT_REWARDS[spec.name])


def _score_now(function: Callable[[RewardedAnswer], float | None], answer: RewardedAnswer) -> Future[float | None]:
    done: Future[float | None] = Future()
    try:
        done.set_result(function(answer))
    except RewardError as error:
        done.set_exception(error)
    return done


class JudgeReward:
    """Judges each distinct answer once, because samples of one prompt are often equal."""

    def __init__(self, client: JudgeClient) -> None:
        self.client = client
        self._futures: dict[Submission, Future[Verdict]] = {}

    def submit(self, answer: RewardedAnswer) -> tuple[Future[Verdict], bool]:
        """Start to judge an answer; see `verdict_of`. Also return False if the row has no tests that run programs."""
        try:
            problem = Problem(answer.sample_id, "", read_tests(answer.ground_truth, answer.sample_id))
            submission = Submission(extract_program(problem, answer.text), problem.tests)
        except Exception as error:  # a model may write anything
            failed: Future[Verdict] = Future()
            failed.set_exception(error)
            return failed, True
        if submission not in self._futures:
            self._futures[submission] = self.client.submit(submission)
        return self._futures[submission], has_tests(problem.tests)

    def forget(self) -> None:
        """Forget the answers of a batch after all of its verdicts have arrived."""
        self._futures.clear()


def verdict_of(future: Future[Verdict]) -> Verdict:
    """Wait for the verdict of `JudgeReward.submit`.

    Raises:
        UserError: the tests of the answer cannot be read.
        RuntimeError: the judge itself failed.
    """
    verdict = future.result()
    if verdict.error_type == "api_error":
        raise RuntimeError(f"the judge failed: {verdict.message}")
    return verdict
