"""What a stage that learns from rewards supplies: a policy that acts, and an environment that rewards.

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
"""Tensors of some trajectories. (trajectories, decisions) are the policy's `response_mask`, 1 at each decision, and
`rollout_log_probs`, as the decisions were sampled; and the step's `loss_mask`, 1 at each decision that counts in the
loss, `advantages`, `old_log_probs` and `reference_log_probs`. The others are the policy's own."""


# Trajectories


@dataclass(frozen=True)
class Prompt:
    """What a group of trajectories starts from.

    Attributes:
        sample_id: names it in every run with this data; seeds derive from it.
        index: its number in the data set.
        fields: what the policy and the environment know of it.
    """

    sample_id: str
    index: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """One action of the policy.

    Attributes:
        observation: what the policy acted on; None for the prompt as the data set has it.
        action: of the policy's own type, such as a `Completion`.
    """

    observation: Any
    action: Any


@dataclass(frozen=True)
class RewardFailure:
    """One failed call of a reward function.

    Attributes:
        reason: one line.
        traceback: of the user's code; empty if nothing was raised there.
        timed_out: whether the call took longer than `reward.time_limit_s`.
    """

    reason: str
    traceback: str = ""
    timed_out: bool = False


class RewardError(Exception):
    """A call of a reward function failed."""

    def __init__(self, failure: RewardFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True)
class Reward:
    """The reward of one trajectory.

    Attributes:
        components: weighted contribution of each reward function, by name.
        failures: why a function has no contribution, by name. A trajectory with a failure has no reward.
        metrics: what else was measured, by the environment's `metric_names`.
        finished_at: `time.perf_counter` when the last component was there; 0 if that is unknown.
    """

    components: dict[str, float]
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    finished_at: float = 0.0

    @property
    def total(self) -> float | None:
        """The sum of the components; None if one failed, because a failure says nothing about the trajectory."""
        return None if self.failures else sum(self.components.values())


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to an action.

    Attributes:
        observation: the context of the next action, or
        reward: the episode is over.
    """

    observation: Any = None
    reward: Reward | None = None


@dataclass
class Trajectory:
    """One episode for a prompt.

    Attributes:
        prompt: what it starts from.
        number: in its group, from 0. Seeds derive from run seed, step, `sample_id` and number.
        observation: what to act on next; None for the prompt as the data set has it.
        turns: the actions so far.
        reward: set when the episode is over.
        advantage: set when all rewards of its group are known.
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
        """See `Reward.total`; None also while the episode lasts."""
        return None if self.reward is None else self.reward.total

    def act(self, action: Any) -> Trajectory:
        """Append a turn; returns the trajectory itself."""
        self.turns.append(Turn(self.observation, action))
        return self

    def advance(self, result: StepResult) -> None:
        """Take over an environment's answer."""
        self.observation, self.reward = result.observation, result.reward


# What a stage supplies


class Environment(ABC):
    """Answers the actions of trajectories with observations and rewards."""

    reward_names: Sequence[str]
    """Of the components of every reward."""
    metric_names: Sequence[str] = ()
    """Of what else is measured in every episode."""
    max_turns = 1
    """Rounds after which every episode is over."""

    def reset(self, prompt: Prompt, number: int) -> Trajectory:
        """Begin an episode."""
        return Trajectory(prompt, number)

    @abstractmethod
    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """Begin to answer the last action; returns at once.

        Returns:
            Waits for the answer. A reward function that fails costs its component and raises nothing.
        """

    def end_batch(self) -> None:  # noqa: B027  # by default there is nothing to do
        """Forget what the trajectories of a batch share; every answer has been waited for."""

    def close(self) -> None:  # noqa: B027  # by default there is nothing to do
        """End everything that was started."""


@dataclass(frozen=True)
class LogProbs:
    """What the model says about the actions of a micro-batch; both are (trajectories, decisions).

    Attributes:
        values: log-probability of each decision.
        entropy: of the distribution of each decision, in nats.
    """

    values: torch.Tensor
    entropy: torch.Tensor


class Policy(ABC):
    """Generates actions and evaluates them; collective if its model is sharded over ranks."""

    metric_names: Sequence[str]
    """Keys of `sample_metrics`."""
    count_name = "total_valid_token_count"
    """Metric that counts decisions."""
    rate_name = "valid_tokens_per_s"
    """Metric of decisions per second."""
    engine_dtype: torch.dtype | None = None
    """Of the weights of an engine that has its own; None if the trained model itself generates."""

    def sampling(self, version: int) -> AbstractContextManager[Metrics]:
        """Generate inside the block by the model as it is now; collective.

        What only generation needs, such as an engine's memory, is given back at the end of the block or at a `Stop`.

        Args:
            version: number of updates that the model has had, by which changed weights are recognized.

        Yields:
            Metrics of the weight sync, by their full names.
        """
        return nullcontext({})

    @abstractmethod
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """Append one turn to each trajectory of this rank; inside `sampling`, and collective.

        Args:
            trajectories: of this rank; may be none.
            step: seeds derive from it, the run's seed, `sample_id` and number.
            greedy: take the most likely action instead of sampling.

        Yields:
            Each trajectory as soon as it has its action, in any order.
        """

    def generate_unfiltered(self, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Trajectories like these whose log-probabilities are of the whole distribution, as in `log_probs`.

        Inside `sampling`, and collective.
        """
        return list(trajectories)

    @abstractmethod
    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Trajectories as tensors on the CPU."""

    @abstractmethod
    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """Evaluate the actions by the model as it is, with gradient where that is enabled; collective."""

    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """(trajectories, decisions): the same by the frozen initial model; collective."""
        raise NotImplementedError(f"{type(self).__name__} has no reference model")

    def sort_by_cost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The order in which trajectories are cut into micro-batches, the most costly first."""
        return list(trajectories)

    @abstractmethod
    def num_decisions(self, trajectory: Trajectory) -> int:
        """Decisions of a trajectory that count in the loss."""

    @abstractmethod
    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """Measurements of a trajectory; `train/NAME_mean` and `train/NAME_max` are logged."""

    @abstractmethod
    def table_row(self, trajectory: Trajectory) -> dict[str, str]:
        """A trajectory for a person to read: column to text."""

    def close(self) -> None:  # noqa: B027  # by default there is nothing to do
        """End everything that was started."""
