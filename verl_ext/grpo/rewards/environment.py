"""The environment of texts: every reward function of the recipe on every answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from eval_pipeline.judge import JudgeClient, JudgeConfig, ResourceLimits, Verdict
from verl_ext.grpo.config import RewardConfig
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.failure import RewardError, RewardFailure
from verl_ext.grpo.policy import Sample
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.custom import CustomReward
from verl_ext.grpo.rewards.judged import OF_VERDICTS, Judged
from verl_ext.grpo.rewards.length import LengthPenalty
from verl_ext.grpo.rewards.registry import LENGTH_PENALTY, OF_TEXTS, wanted_rewards
from verl_ext.grpo.rewards.user_function import UserFunction
from verl_ext.plugins import Plugin

_VERDICT = "verdict"


class _Waiting:
    """What one sample waits for."""

    def __init__(self, futures: dict[str, Future[Any]]) -> None:
        """By the names of the functions; one verdict serves several."""
        self.futures = futures
        self.finished = 0.0
        self.verdict: Verdict | None = None
        for future in futures.values():
            future.add_done_callback(self._note)

    def _note(self, future: Future[Any]) -> None:
        self.finished = max(self.finished, time.perf_counter())


class TextEnvironment(Environment):
    """Rewards completions; a function that fails costs its sample the reward, and nothing else."""

    def __init__(self, reward: RewardConfig, max_tokens: int, num_ranks_here: int) -> None:
        """Start what the functions need.

        Args:
            reward: the functions, their weights and their limits.
            max_tokens: of an answer, see `LengthPenalty`.
            num_ranks_here: ranks on this machine, which share its processors.

        Raises:
            UserError: a function cannot be loaded, or the judge's isolation does not work here.
        """
        wanted = wanted_rewards(reward.functions)
        self.names = [each.name for each in wanted]
        self._weights = {each.name: each.weight for each in wanted}
        self._waiting: list[_Waiting] = []
        self._closing = ExitStack()
        num_workers = reward.num_workers or max(len(os.sched_getaffinity(0)) // num_ranks_here, 1)
        self._by_verdict = {each.name for each in wanted if each.by_verdict}
        self._judged = self._start_judge(reward, num_workers) if self._by_verdict else None
        self._texts: dict[str, Callable[[RewardedAnswer], float]] = {
            **OF_TEXTS,
            LENGTH_PENALTY: LengthPenalty(max_tokens, reward.length_buffer),
        }
        self._custom: dict[str, CustomReward] = {}
        for each in wanted:
            if each.plugin is not None and each.plugin.is_file:
                self._custom[each.name] = self._start_custom(each.plugin, reward.time_limit_s, num_workers)
            elif each.plugin is not None:
                self._texts[each.name] = UserFunction(each.plugin)

    def submit(self, sample: Sample) -> None:
        """See `Environment.submit`."""
        answer = answer_of(sample)
        self._waiting.append(_Waiting({name: self._begun(name, answer) for name in self._wanted_names}))

    def collect(self) -> list[Reward]:
        """See `Environment.collect`."""
        waiting, self._waiting = self._waiting, []
        rewards = [self._reward(item) for item in waiting]
        if self._judged is not None:
            self._judged.forget()
        return rewards

    def close(self) -> None:
        """See `Environment.close`."""
        self._closing.close()

    def _begun(self, name: str, answer: RewardedAnswer) -> Future[Any]:
        """The unweighted part, or for a reward by verdict the verdict, some time later."""
        if name in self._custom:
            return self._custom[name].submit(answer)
        if name == _VERDICT and self._judged is not None:
            return self._judged.submit(answer)
        done: Future[float] = Future()
        try:
            done.set_result(self._texts[name](answer))
        except RewardError as error:
            done.set_exception(error)
        return done

    @property
    def _wanted_names(self) -> list[str]:
        others = [name for name in self.names if name not in self._by_verdict]
        return others if self._judged is None else [_VERDICT, *others]

    def _reward(self, waiting: _Waiting) -> Reward:
        values: dict[str, float] = {}
        failures: dict[str, RewardFailure] = {}
        for name in self.names:
            try:
                values[name] = self._weights[name] * self._value(name, waiting)
            except RewardError as error:
                failures[name] = error.failure
            except Exception as error:  # it costs the sample its reward, and is reported
                failures[name] = RewardFailure(f"{error}" or type(error).__name__)
        return Reward(values, failures, waiting.finished)

    def _value(self, name: str, waiting: _Waiting) -> float:
        if name in self._by_verdict and self._judged is not None:
            waiting.verdict = waiting.verdict or self._judged.verdict(waiting.futures[_VERDICT])
            return OF_VERDICTS[name](waiting.verdict)
        return waiting.futures[name].result()

    def _start_judge(self, reward: RewardConfig, num_workers: int) -> Judged:
        limits = ResourceLimits(cpu_s=reward.cpu_s, wall_s=reward.wall_s, memory_mb=reward.memory_mb)
        config = JudgeConfig(
            isolation=reward.isolation, num_workers=num_workers, packages=reward.packages, limits=limits
        )
        judged = Judged(JudgeClient(config, section="reward"))
        self._closing.callback(judged.close)
        return judged

    def _start_custom(self, plugin: Plugin, time_limit_s: float, num_workers: int) -> CustomReward:
        custom = CustomReward(plugin, time_limit_s, num_workers)
        self._closing.callback(custom.close)
        return custom


def answer_of(sample: Sample) -> RewardedAnswer:
    """What a reward function sees of a sample."""
    action = sample.action
    return RewardedAnswer.to_prompt(
        sample.prompt.sample_id, sample.prompt.content, action.text, len(action.token_ids), action.truncated
    )
