"""A policy without tokens: it pulls one of several arms, twice in each action, by learned scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_ext.errors import Stop
from verl_ext.grpo.config import ActorConfig, AlgorithmConfig
from verl_ext.grpo.protocols import (
    Environment,
    LogProbs,
    Metrics,
    MicroBatch,
    Policy,
    Prompt,
    Reward,
    StepResult,
    Trajectory,
)
from verl_ext.grpo.step import GRPOStep
from verl_ext.metrics.timing import StepTimer

NUM_ARMS = 4
DECISIONS = 2


class Bandit(Policy):
    """Scores for each prompt and arm; prompts are identified by their index."""

    metric_names = ("pulled",)

    def __init__(self, num_prompts: int, seed: int = 0) -> None:
        """Initialize the scores at random."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(num_prompts, NUM_ARMS, generator=generator, dtype=torch.float64)
        self.scores = torch.nn.Parameter(scores)
        self.first = scores.clone()
        self.versions: list[int] = []
        self.samples = False

    @contextmanager
    def sampling(self, version: int) -> Iterator[Metrics]:
        self.versions.append(version)
        self.samples = True
        try:
            yield {}
        except Stop:
            self.samples = False
            raise
        self.samples = False

    @torch.no_grad()
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """The last trajectory comes first."""
        for trajectory in reversed(trajectories):
            index, turn = trajectory.prompt.index, len(trajectory.turns)
            log_probs = self.scores[index].log_softmax(-1)
            seed = step * 10_000 + index * 100 + trajectory.number + 1_000_000 * turn
            generator = torch.Generator().manual_seed(seed)
            sampled = torch.multinomial(log_probs.exp(), DECISIONS, replacement=True, generator=generator)
            arms = log_probs.argmax().expand(DECISIONS) if greedy else sampled
            yield trajectory.act((arms, log_probs[arms]))

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        return {
            "rows": torch.tensor([trajectory.prompt.index for trajectory in trajectories]),
            "arms": torch.stack([trajectory.action[0] for trajectory in trajectories]),
            "response_mask": torch.ones(len(trajectories), DECISIONS, dtype=torch.long),
            "rollout_log_probs": torch.stack([trajectory.action[1] for trajectory in trajectories]),
        }

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        return _evaluated(self.scores, micro_batch)

    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        return _evaluated(self.first, micro_batch).values

    def sort_by_cost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return sorted(trajectories, key=lambda trajectory: -trajectory.number)

    def num_decisions(self, trajectory: Trajectory) -> int:
        return DECISIONS

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        return {"pulled": float(trajectory.action[0].sum())}

    def table_row(self, trajectory: Trajectory) -> dict[str, str | float]:
        return {"arms": str(trajectory.action[0].tolist())}


def _evaluated(scores: torch.Tensor, micro_batch: MicroBatch) -> LogProbs:
    log_probs = scores[micro_batch["rows"]].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True).expand(-1, DECISIONS)
    return LogProbs(log_probs.gather(1, micro_batch["arms"]), entropy)


class Machine(Environment):
    """Rewards pulls: a prompt's own arm gives 1 each time it is pulled."""

    reward_names = ("pay",)

    def __init__(self) -> None:
        self.num_batches = 0

    def reward_of(self, trajectory: Trajectory) -> Reward:
        """The reward of the last action."""
        return Reward({"pay": float((trajectory.action[0] == trajectory.prompt.index % NUM_ARMS).sum())})

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        return lambda: StepResult(reward=self.reward_of(trajectory))

    def end_batch(self) -> None:
        self.num_batches += 1


def prompts(*indices: int) -> list[Prompt]:
    """Prompts by their indices."""
    return [Prompt(f"prompt_{index}", index, {}) for index in indices]


def grpo_step(
    policy: Policy, machine: Machine, algorithm: AlgorithmConfig, actor: ActorConfig, **more: Any
) -> GRPOStep:
    """A step on the CPU, without guards of the engine and without what only a trainer needs unless given."""
    arguments = {
        "skip_update": lambda: None,
        "timer": StepTimer(),
        "device": "cpu",
        "before_micro_batch": lambda is_last: None,
        "is_interrupted": lambda: False,
        "wait": lambda is_waiting: None,
        "replacement_prompts": lambda round_number, numbers: [],
        "before_update": lambda trajectories: None,
        "max_engine_gap": math.inf,
        "trace": None,
    }
    return GRPOStep(policy, machine, algorithm, actor, **{**arguments, **more})  # type: ignore[arg-type]
