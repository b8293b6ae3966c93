"""Runs all that is compared, sample by sample."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.adaptive.canary import Canary
from eval_pipeline.adaptive.results import Cell, Results
from eval_pipeline.adaptive.sample_runs import SampleRuns
from eval_pipeline.adaptive.subject import Subject
from verl_ext.console import progress_bar
from verl_ext.controller.inference import Decision
from verl_ext.controller.latency import LatencySource
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import Configuration, cheapest_configuration
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

CHECKED_QUESTIONS = 8
"""On how many the least budget is tried out."""
WARM_UPS = 3
"""Runs of everything at each tier before anything counts."""
DECIDING = ("decision_ms", "features_ms", "network_ms", "choice_ms")


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        statics: configurations that run for every question.
        budgets_ms: that the controller decides for.
        repeats: runs of each, of which the median counts.
        seed: of the configurations that are drawn.
    """

    statics: Sequence[Configuration]
    budgets_ms: Sequence[float]
    repeats: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Of what ran for questions that the controller was not trained on, and for some that it was.

    Attributes:
        train: (training samples, statics).
        statics: (samples, statics).
        chosen: (samples, budgets), the controller's choices without what deciding took.
        deciding: (samples, budgets, 4), milliseconds by `DECIDING`.
        drawn: (samples, budgets), configurations that were drawn evenly.
        full: (samples, 1), all of the model.
        full_ms: mean of that in milliseconds as measured, wherever latencies come from otherwise.
        share_again: measurements that were made again over all runs, see `Canary`.
    """

    train: Results
    statics: Results
    chosen: Results
    deciding: NDArray[np.float64]
    drawn: Results
    full: Results
    full_ms: float
    share_again: float


@dataclass(frozen=True)
class SampleCells:
    """Of one question that the controller was not trained on; see `Measured`."""

    statics: list[Cell]
    chosen: list[Cell]
    deciding: list[tuple[float, ...]]
    drawn: list[Cell]
    full: Cell
    full_ms: float


class Bench:
    """Runs a plan.

    Args:
        subject: what is evaluated.
        plan: of what is run.
        latency: where latencies come from.
    """

    def __init__(self, subject: Subject, plan: Plan, latency: LatencySource) -> None:
        self._subject, self._plan, self._latency = subject, plan, latency
        self._cheapest = cheapest_configuration(subject.space, subject.importance)
        self._canary = Canary(latency.is_measured and subject.model.runner.adapter.model.device.type == "cpu")

    def check_budgets(self, samples: Sequence[ImageQuestion]) -> None:
        """Get warm, and refuse budgets that nothing can keep.

        Raises:
            UserError: the least one is below what the cheapest configuration takes for most of the questions.
        """
        self._warm_up(samples[0])
        runs = (self._runs(sample) for sample in samples[:CHECKED_QUESTIONS])
        needed = statistics.median(self._latency.run_ms(each.run(self._cheapest)) for each in runs)
        least = min(self._plan.budgets_ms)
        if least < needed:
            raise UserError(
                f"the budgets begin at {least:g} ms, but the cheapest configuration takes {needed:.1f} ms; give "
                f"--budgets from {needed * 1.05:.1f} ms on"
            )

    def run(self, train: Sequence[ImageQuestion], held_out: Sequence[ImageQuestion]) -> Measured:
        """Run everything for each sample.

        Args:
            train: questions for the lookup table.
            held_out: questions to compare on.
        """
        self._score = AnswerScorer([*train, *held_out])
        plan, num_budgets = self._plan, len(self._plan.budgets_ms)
        of_sample = len(plan.statics) + 2 * num_budgets + 1
        total = len(train) * len(plan.statics) + len(held_out) * of_sample
        with progress_bar(total=total, desc="measuring", unit="runs") as bar:
            trained = [self._statics(self._runs(sample), bar) for sample in train]
            cells = [self._held_out(self._runs(sample), bar) for sample in held_out]
        return Measured(
            Results.of(trained),
            Results.of([each.statics for each in cells]),
            Results.of([each.chosen for each in cells]),
            np.array([each.deciding for each in cells]),
            Results.of([each.drawn for each in cells]),
            Results.of([[each.full] for each in cells]),
            statistics.fmean(each.full_ms for each in cells),
            self._canary.share_again,
        )

    def _held_out(self, runs: SampleRuns, bar: tqdm) -> SampleCells:
        space, budgets = self._subject.space, self._plan.budgets_ms
        statics = self._statics(runs, bar)
        decisions = [runs.decide(budget) for budget in budgets]
        added = [self._added(runs, decision) for decision in decisions]
        deciding: list[tuple[float, ...]] = [
            (ms, each.features_ms, each.network_ms, each.choice_ms) for ms, each in zip(added, decisions)
        ]
        chosen = [self._cell(runs, decision.configuration, bar) for decision in decisions]
        drawn = [self._cell(runs, self._draw(runs.sample, place), bar) for place in range(len(budgets))]
        full = self._cell(runs, space.full, bar)
        full_ms = runs.run(space.full).latency.total_ms
        return SampleCells(statics, chosen, deciding, drawn, full, full_ms)

    def _added(self, runs: SampleRuns, decision: Decision) -> float:
        """What deciding adds: the look at the lowest tier too, unless that is what was chosen."""
        own_ms = self._latency.decision_ms(decision)
        if not decision.configuration.tier:
            return own_ms
        return own_ms + self._latency.encode_ms(runs.seen(0), self._subject.adapter)

    def _draw(self, sample: ImageQuestion, place: int) -> Configuration:
        rng = random.Random(f"{self._plan.seed} {sample.sample_id} {place}")
        return self._subject.space.sample(rng)

    def _statics(self, runs: SampleRuns, bar: tqdm) -> list[Cell]:
        return [self._cell(runs, configuration, bar) for configuration in self._plan.statics]

    def _cell(self, runs: SampleRuns, configuration: Configuration, bar: tqdm) -> Cell:
        outcome = runs.run(configuration)
        bar.update()
        accuracy = self._score(runs.sample, outcome.answer)
        return accuracy, self._latency.run_ms(outcome), self._subject.space.complexity(configuration)

    def _runs(self, sample: ImageQuestion) -> SampleRuns:
        return SampleRuns(self._subject.model, sample, self._plan.repeats, self._cheapest, self._canary)

    def _warm_up(self, sample: ImageQuestion) -> None:
        space = self._subject.space
        for _ in range(WARM_UPS):
            runs = self._runs(sample)
            runs.decide(self._plan.budgets_ms[0])
            for tier in range(len(space.tiers)):
                runs.run(space.configuration(tier, [True] * space.num_blocks))
