"""Runs all methods of a comparison, sample by sample, and repeats runs that other processes disturbed."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from verl_ext.console import progress_bar
from verl_ext.controller.evaluation.results import Cell, Measurements, ResultMatrices
from verl_ext.controller.execution import NUM_WARM_UPS, EncodedImage, RunResult, median_latency
from verl_ext.controller.inference import AdaptiveModel, Decision, decision_ms_of
from verl_ext.controller.latency import NUM_CHECKED_QUESTIONS, LatencySource
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import Configuration
from verl_ext.data.image_questions import ImageQuestion

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

DISTURBED = 1.15
"""Ratio of the probe's duration to the usual duration above which the processor counts as busy."""
MAX_ATTEMPTS = 4
"""Maximum number of measurements of a run."""
NUM_DURATIONS = 200
"""Number of latest probe durations, whose lower quartile is the usual duration."""
PROBE_SIZE = (64, 512, 6)
"""Rows, columns and number of the probe's matrix products, which take about 0.6 ms."""


class InterferenceDetector:
    """Repeats measurements on a CPU that other processes disturb.

    A virtual machine shares its host. If others use the processor for a fraction of a second, a run in that time takes
    twice as long, whichever method chose it. So a small, constant probe is timed before and after each run, and the run
    is repeated if either was slow. The decision to repeat does not depend on the run's own result or time.

    Args:
        is_enabled: False measures everything once, for example on a GPU, where latency does not depend on host load.
    """

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        rows, columns, self._num_products = PROBE_SIZE
        self._left, self._right = torch.zeros(rows, columns), torch.zeros(columns, columns)
        self._durations: deque[float] = deque(maxlen=NUM_DURATIONS)
        self.num_runs = self.num_retries = 0

    def run(self, measure: Callable[[], T]) -> T:
        """Measure, repeat while the measurement was disturbed, and return the last result."""
        self.num_runs += 1
        if not self._is_enabled:
            return measure()
        for attempt in range(MAX_ATTEMPTS):
            self.num_retries += attempt > 0
            before = self._probe()
            result = measure()
            if max(before, self._probe()) <= DISTURBED * float(np.quantile(self._durations, 0.25)):
                break
        return result

    @property
    def retries_per_run(self) -> float:
        """Number of repeated measurements per run."""
        return self.num_retries / max(1, self.num_runs)

    @torch.inference_mode()
    def _probe(self) -> float:
        start = perf_counter()
        for _ in range(self._num_products):
            torch.mm(self._left, self._right)
        self._durations.append(perf_counter() - start)
        return self._durations[-1]


class SampleMeasurements:
    """Runs configurations on a sample, each only once for all methods.

    The image is encoded once per tier, and that time counts for every configuration of the tier.

    Args:
        repeats: runs of each configuration; the medians of the parts count.
        cheapest: configuration for the warm-up at each tier, because the first run is slower.
        detector: repeats disturbed runs.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        sample: ImageQuestion,
        repeats: int,
        cheapest: Configuration,
        detector: InterferenceDetector,
    ) -> None:
        self.sample, self._model, self._repeats, self._cheapest = sample, model, repeats, cheapest
        self._detector = detector
        self._image = sample.load_image()
        self._encoded: dict[int, EncodedImage] = {}
        self._results: dict[Configuration, RunResult] = {}

    def encoded(self, tier: int) -> EncodedImage:
        """The encoded image at a tier."""
        if tier not in self._encoded:
            encode, question = self._model.runner.encode, self.sample.question
            self._model.runner.answer(encode(self._image, question, tier), replace(self._cheapest, tier=tier))
            repeated = self._repeat(lambda: encode(self._image, question, tier))
            vision_ms = statistics.median(each.vision_ms for each in repeated)
            self._encoded[tier] = replace(repeated[0], vision_ms=vision_ms)
        return self._encoded[tier]

    def run(self, configuration: Configuration) -> RunResult:
        """The result of a configuration."""
        if configuration not in self._results:
            encoded, answer = self.encoded(configuration.tier), self._model.runner.answer
            repeated = self._repeat(lambda: answer(encoded, configuration))
            latency = median_latency([each.latency for each in repeated])
            self._results[configuration] = replace(repeated[0], latency=latency)
        return self._results[configuration]

    def decide(self, budget_ms: float) -> Decision:
        """The controller's decision for a budget, measured right after encoding the image, as in production.

        Right after another decision, the controller's weights would be in the processor's caches.
        """
        question, encode = self.sample.question, self._model.runner.encode
        repeated = self._repeat(lambda: self._model.decide(encode(self._image, question, 0), question, budget_ms))
        parts = zip(*((each.features_ms, each.network_ms, each.choice_ms) for each in repeated))
        return Decision(repeated[0].configuration, *map(statistics.median, parts))

    def _repeat(self, measure: Callable[[], T]) -> list[T]:
        return [self._detector.run(measure) for _ in range(self._repeats)]


class ControllerBenchmark:
    """Runs static configurations, the controller's choices, random ones and the full configuration.

    Args:
        cheapest: see `SampleMeasurements`, also for `repeats`.
        budgets_ms: budgets for the controller's decisions.
        seed: seed of the random configurations.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        cheapest: Configuration,
        budgets_ms: Sequence[float],
        latency: LatencySource,
        repeats: int,
        seed: int,
    ) -> None:
        self._model, self._cheapest, self._budgets_ms, self._latency = model, cheapest, budgets_ms, latency
        self._repeats, self._seed = repeats, seed
        on_cpu = model.runner.adapter.model.device.type == "cpu"
        self._detector = InterferenceDetector(latency.is_measured and on_cpu)

    def measure_cheapest(self, questions: Sequence[ImageQuestion]) -> list[float]:
        """Warm up, and return the latency of the cheapest configuration including the decision, for some questions."""
        space, lowest_ms = self._model.space, self._budgets_ms[0]
        for _ in range(NUM_WARM_UPS):
            runs = self._measurements(questions[0])
            runs.decide(lowest_ms)
            for tier in range(len(space.tiers)):
                runs.run(space.configuration(tier, [True] * space.num_blocks))
        checked = [self._measurements(question) for question in questions[:NUM_CHECKED_QUESTIONS]]
        return [
            self._latency.run_ms(each.run(self._cheapest)) + self._latency.deciding_ms_of(each.decide(lowest_ms))
            for each in checked
        ]

    def run(
        self, statics: Sequence[Configuration], train: Sequence[ImageQuestion], held_out: Sequence[ImageQuestion]
    ) -> Measurements:
        """Run static configurations on the questions for the lookup table, and all methods on held-out questions."""
        self._score, space = AnswerScorer([*train, *held_out]), self._model.space
        runs_per_question = len(statics) + 2 * len(self._budgets_ms) + 1
        total = len(train) * len(statics) + len(held_out) * runs_per_question
        rows: dict[str, list[list[Cell]]] = {"statics": [], "chosen": [], "random": [], "full": []}
        deciding, full_ms, configurations = [], [], []
        with progress_bar(total=total, desc="measuring", unit="runs") as bar:
            trained = [self._cells(self._measurements(sample), statics, bar) for sample in train]
            for sample in held_out:
                runs = self._measurements(sample)
                rows["statics"].append(self._cells(runs, statics, bar))
                decisions = [runs.decide(budget) for budget in self._budgets_ms]
                deciding.append([self._decision_parts(runs, decision) for decision in decisions])
                configurations.append([each.configuration for each in decisions])
                rows["chosen"].append(self._cells(runs, configurations[-1], bar))
                seeds = [f"{self._seed} {sample.sample_id} {number}" for number in range(len(self._budgets_ms))]
                rows["random"].append(self._cells(runs, [space.sample(random.Random(seed)) for seed in seeds], bar))
                rows["full"].append(self._cells(runs, [space.full], bar))
                full_ms.append(runs.run(space.full).latency.total_ms)
        return Measurements(
            train=ResultMatrices.from_cells(trained),
            deciding=np.array(deciding),
            full_ms=statistics.fmean(full_ms),
            retries_per_run=self._detector.retries_per_run,
            is_measured=self._latency.is_measured,
            sample_ids=[sample.sample_id for sample in held_out],
            train_sample_ids=[sample.sample_id for sample in train],
            configurations=configurations,
            **{name: ResultMatrices.from_cells(cells) for name, cells in rows.items()},
        )

    def _decision_parts(self, runs: SampleMeasurements, decision: Decision) -> tuple[float, ...]:
        """Milliseconds by `DECISION_PARTS`."""
        deciding_ms, encode_ms = self._latency.deciding_ms_of(decision), self._latency.encode_ms(runs.encoded(0))
        decision_ms = decision_ms_of(decision.configuration, deciding_ms, encode_ms)
        return decision_ms, decision.features_ms, decision.network_ms, decision.choice_ms

    def _cells(self, runs: SampleMeasurements, configurations: Sequence[Configuration], bar: tqdm) -> list[Cell]:
        cells = []
        for configuration in configurations:
            result = runs.run(configuration)
            bar.update()
            accuracy = self._score(runs.sample, result.answer)
            cells.append((accuracy, self._latency.run_ms(result), self._model.space.complexity(configuration)))
        return cells

    def _measurements(self, sample: ImageQuestion) -> SampleMeasurements:
        return SampleMeasurements(self._model, sample, self._repeats, self._cheapest, self._detector)
