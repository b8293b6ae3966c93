"""A policy without tokens: it pulls one of several arms, twice in each action, by learnt scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.policy import LogProbs, MicroBatch, Policy, Prompt, Sample

NUM_ARMS = 4
DECISIONS = 2


class Bandit(Policy):
    """Scores for each prompt and arm; prompts are known by their rows."""

    figures = ("pulled",)

    def __init__(self, num_prompts: int, seed: int = 0) -> None:
        """Random scores."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(num_prompts, NUM_ARMS, generator=generator, dtype=torch.float64)
        self.scores = torch.nn.Parameter(scores)
        self.first = scores.clone()
        self.versions: list[int] = []
        self.draws = False

    def begin_drawing(self, version: int) -> dict[str, float]:
        """See `Policy.begin_drawing`."""
        self.versions.append(version)
        self.draws = True
        return {}

    @torch.no_grad()
    def draw(self, prompts: Sequence[Prompt], step: int, *, num_samples: int, greedy: bool = False) -> Iterator[Sample]:
        """See `Policy.draw`; the last prompt comes first."""
        for prompt in reversed(prompts):
            log_probs = self.scores[prompt.row].log_softmax(-1)
            for number in reversed(range(num_samples)):
                generator = torch.Generator().manual_seed(step * 10_000 + prompt.row * 100 + number)
                drawn = torch.multinomial(log_probs.exp(), DECISIONS, replacement=True, generator=generator)
                arms = log_probs.argmax().expand(DECISIONS) if greedy else drawn
                yield Sample(prompt, number, (arms, log_probs[arms]))

    def end_drawing(self) -> None:
        """See `Policy.end_drawing`."""
        self.draws = False

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """See `Policy.collate`."""
        return {
            "rows": torch.tensor([sample.prompt.row for sample in samples]),
            "arms": torch.stack([sample.action[0] for sample in samples]),
            "mask": torch.ones(len(samples), DECISIONS, dtype=torch.long),
            "rollout_log_probs": torch.stack([sample.action[1] for sample in samples]),
        }

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """See `Policy.log_probs`."""
        return _evaluated(self.scores, micro_batch)

    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Policy.reference_log_probs`."""
        return _evaluated(self.first, micro_batch).values

    def order(self, samples: Sequence[Sample]) -> list[int]:
        """See `Policy.order`."""
        return sorted(range(len(samples)), key=lambda number: -samples[number].number)

    def num_decisions(self, sample: Sample) -> int:
        """See `Policy.num_decisions`."""
        return DECISIONS

    def measure(self, sample: Sample) -> dict[str, float]:
        """See `Policy.measure`."""
        return {"pulled": float(sample.action[0].sum())}

    def row(self, sample: Sample) -> dict[str, str]:
        """See `Policy.row`."""
        return {"arms": str(sample.action[0].tolist())}

    def close(self) -> None:
        """See `Policy.close`."""


def _evaluated(scores: torch.Tensor, micro_batch: MicroBatch) -> LogProbs:
    log_probs = scores[micro_batch["rows"]].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True).expand(-1, DECISIONS)
    return LogProbs(log_probs.gather(1, micro_batch["arms"]), entropy)


class Machine(Environment):
    """Pays for arms: the arm of a prompt's number pays 1 each time it is pulled."""

    names = ("pay",)

    def __init__(self) -> None:
        """Nothing was pulled yet."""
        self._waiting: list[Sample] = []

    def submit(self, sample: Sample) -> None:
        """See `Environment.submit`."""
        self._waiting.append(sample)

    def collect(self) -> list[Reward]:
        """See `Environment.collect`."""
        waiting, self._waiting = self._waiting, []
        return [Reward({"pay": float((s.action[0] == s.prompt.row % NUM_ARMS).sum())}) for s in waiting]

    def close(self) -> None:
        """See `Environment.close`."""


def prompts(*rows: int) -> list[Prompt]:
    """Prompts by their rows."""
    return [Prompt(f"prompt_{row}", row, {}) for row in rows]
