"""Interfaces of stages that learn from rewards: a policy that acts, and an environment that rewards.

A step generates in rounds: in each round, every live trajectory gets one action from the policy, and then its
environment answers with the next observation or with the reward. The batches of an engine therefore depend on the state
alone and not on how long a reward took, so a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Metrics: TypeAlias = "dict[str, float]"
MicroBatch: TypeAlias = "dict[str, torch.Tensor]"
"""Tensors of some trajectories. Shape (trajectories, decisions): from the policy, `response_mask`, 1 at each decision,
and `rollout_log_probs`, from sampling; from the step, `loss_mask`, 1 at each decision that counts in the loss,
`advantages`, `old_log_probs` and `reference_log_probs`. All others are the policy's own."""


# Trajectories


@dataclass(frozen=True)
class Prompt:
    """The start of a group of trajectories.

    Attributes:
        sample_id: identifies the prompt in all runs with this data; seeds derive from it.
        index: index in the dataset.
        fields: data for the policy and the environment.
    """

    sample_id: str
    index: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """One action of the policy.

    Attributes:
        observation: what the policy acted on; None for the original prompt.
        action: the action, of the policy's own type, such as `Completion`.
    """

    observation: Any
    action: Any


@dataclass(frozen=True)
class RewardFailure:
    """One failed call of a reward function.

    Attributes:
        reason: why it failed, in one line.
        traceback: traceback of the user's code; empty if it did not raise.
        timed_out: whether the call took longer than `reward.time_limit_s`.
        kind: what failures of one cause share, such as ZeroDivisionError or None; each kind is reported once.
    """

    reason: str
    traceback: str = ""
    timed_out: bool = False
    kind: str = "other"


class RewardError(Exception):
    """A call of a reward function failed."""

    def __init__(self, failure: RewardFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True)
class Reward:
    """The reward of one trajectory.

    Attributes:
        components: weighted contribution of each reward function that applies, by name.
        failures: failed reward functions, by name. A trajectory with a failure has no total reward.
        metrics: other measurements, by the environment's `metric_names`.
        texts: texts of the sample table by column, such as reference and verdict; every reward has the same columns.
        finished_at: `time.perf_counter` when the last component arrived; 0 if unknown.
    """

    components: dict[str, float]
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    finished_at: float = 0.0

    @property
    def total(self) -> float | None:
        """The sum of the components; None if one of them failed."""
        return None if self.failures else sum(self.components.values())


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to an action.

    Attributes:
        observation: the context of the next action, unless the episode is over.
        reward: set if the episode is over.
    """

    observation: Any = None
    reward: Reward | None = None


@dataclass
class Trajectory:
    """One episode for a prompt.

    Attributes:
        prompt: the start of the episode.
        number: index in its group, from 0. Seeds derive from run seed, step, `sample_id` and number.
        observation: what to act on next; None for the original prompt.
        turns: the actions so far.
        reward: set at the end of the episode.
        advantage: set once all rewards of the group are known.
    """

    prompt: Prompt
    number: int
    observation: Any = None
    turns: list[Turn] = field(default_factory=list)
    reward: Reward | None = None
    advantage: float = 0.0

    @property
    def action(self) -> Any:
        """The last action."""
        return self.turns[-1].action

    @property
    def total_reward(self) -> float | None:
        """The reward's total; None before the end of the episode."""
        return None if self.reward is None else self.reward.total

    def act(self, action: Any) -> Trajectory:
        """Append a turn and return the trajectory."""
        self.turns.append(Turn(self.observation, action))
        return self

    def advance(self, result: StepResult) -> None:
        """Apply an environment's answer."""
        self.observation, self.reward = result.observation, result.reward


# What a stage supplies


class Environment(ABC):
    """Answers the actions of trajectories with observations and rewards."""

    reward_names: Sequence[str]
    """Names of the components of every reward."""
    metric_names: Sequence[str] = ()
    """Names of other metrics of every episode."""
    max_turns = 1
    """Maximum number of actions in an episode."""

    def reset(self, prompt: Prompt, number: int) -> Trajectory:
        """Start an episode."""
        return Trajectory(prompt, number)

    @abstractmethod
    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """Start to answer the last action, without waiting for the answer.

        Returns:
            A function that waits for the answer. If a reward function fails, its component is missing and nothing is
            raised.
        """

    def waiting_for(self) -> str:
        """Describe the answers of the batch that have not arrived, for a warning; called from another thread."""
        return ""

    def end_batch(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Release what the trajectories of a batch share; called after all answers have arrived."""

    def close(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Stop all processes that were started."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities and entropies of a micro-batch, each (trajectories, decisions).

    Attributes:
        values: log-probability of each decision.
        entropy: entropy of the distribution of each decision, in nats.
        entropy_bonus: what the entropy bonus of the loss averages; None for `entropy`.
    """

    values: torch.Tensor
    entropy: torch.Tensor
    entropy_bonus: torch.Tensor | None = None


class Policy(ABC):
    """Generates actions and computes their log-probabilities; collective if its model is sharded over ranks."""

    metric_names: Sequence[str]
    """Keys of `sample_metrics`."""
    count_name = "total_valid_token_count"
    """Metric that counts decisions."""
    rate_name = "valid_tokens_per_s"
    """Metric of decisions per second."""
    engine_dtype: torch.dtype | None = None
    """dtype of the engine's own weights; None if the trained model itself generates."""

    def sampling(self, version: int) -> AbstractContextManager[Metrics]:
        """Prepare generation with the current weights; collective.

        Resources that only generation needs, such as an engine's memory, are released at the end of the block or at a
        `Stop`.

        Args:
            version: number of completed training steps, which identifies the weights.

        Yields:
            Metrics of the weight sync, by full name.
        """
        return nullcontext({})

    @abstractmethod
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """Append one turn to each trajectory of this rank; collective. Call it inside `sampling`.

        Args:
            trajectories: trajectories of this rank, possibly none.
            step: seeds derive from the step, the run's seed, `sample_id` and number.
            greedy: take the most likely action instead of sampling.

        Yields:
            Each trajectory once it has its action, in any order.
        """

    @abstractmethod
    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Convert trajectories to tensors on the CPU."""

    @abstractmethod
    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """Evaluate the actions with the current weights, with gradients if enabled; collective."""

    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities under the frozen initial model, (trajectories, decisions); collective."""
        raise NotImplementedError(f"{type(self).__name__} has no reference model")

    def sort_by_cost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Sort trajectories for splitting into micro-batches, the most expensive first."""
        return list(trajectories)

    @abstractmethod
    def num_decisions(self, trajectory: Trajectory) -> int:
        """Number of decisions of a trajectory that count in the loss."""

    @abstractmethod
    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """Measurements of a trajectory; `train/NAME_mean` and `train/NAME_max` are logged."""

    @abstractmethod
    def table_row(self, trajectory: Trajectory) -> dict[str, str | float]:
        """A row of the sample table: text or number by column."""

    def close(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Stop all processes that were started."""
