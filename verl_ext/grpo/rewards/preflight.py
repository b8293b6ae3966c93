"""Loads the reward functions of a recipe and starts the judge once, in the launcher, so that mistakes end it there."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

from omegaconf import DictConfig

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.packages import find_packages
from verl_ext.grpo.rewards.custom import CustomReward
from verl_ext.grpo.rewards.in_process import InProcess
from verl_ext.grpo.rewards.judged import OF_VERDICTS
from verl_ext.grpo.rewards.registry import wanted_rewards


def check_rewards(reward: DictConfig) -> None:
    """Load every reward function of the user's own, and start the judge where a function needs its verdicts.

    Args:
        reward: the section of that name.

    Raises:
        UserError: a function does not exist or cannot be loaded, a package is not installed, or the judge's isolation
            does not work here.
    """
    wanted = wanted_rewards(list(reward.functions))
    find_packages(list(reward.packages), "reward.packages")
    for own in (each.own for each in wanted if each.own is not None):
        if own.is_file:
            CustomReward(Path(own.place), own.name, reward.time_limit_s, num_workers=1).close()
        else:
            InProcess(own)
    if any(each.own is None and each.name in OF_VERDICTS for each in wanted):
        with redirect_stderr(io.StringIO()), JudgeServer(reward.isolation, 1, packages=list(reward.packages)):
            pass  # the ranks warn of a weaker isolation, once their servers have it
