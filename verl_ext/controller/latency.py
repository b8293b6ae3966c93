"""Latency of runs: measured, or predicted by a latency model that is fitted on this machine."""

from __future__ import annotations

import json
import math
import platform
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from verl_ext.console import print_line, progress_bar, warn
from verl_ext.controller.adapters import VLMAdapter
from verl_ext.controller.config import PERCENTILES
from verl_ext.controller.execution import EncodedImage, Latency, RunResult, RunWorkload, VLMRunner, median_latency
from verl_ext.controller.inference import AdaptiveModel, Decision
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.controller.vlm import fingerprint, matches_fingerprint, precision_of
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.errors import UserError
from verl_ext.files import parse_json, replace_file, write_errors
from verl_ext.hardware import cpu_name

LATENCY_FILE = "latency_model.json"
"""File in a run directory with the latency model that the run fitted."""
FEATURES = {
    "vision_ms": ("call", "patches", "patches^2"),
    "prefill_ms": ("call", "tokens", "blocks", "blocks*tokens", "blocks*tokens^2", "experts", "experts*tokens"),
    "decode_ms": ("tokens", "blocks", "blocks*context", "experts"),
}
"""The time of each part is a weighted sum of these features, with non-negative weights. `blocks` is the number of
active blocks and `experts` the sum of their top-k. `tokens` counts prompt tokens in prefill, and decoded tokens in
decode, where blocks and experts count once per token."""
NUM_CHECKED_QUESTIONS = 8
"""Number of questions on which to check the lowest budget."""
MARGIN = 1.05
"""Factor by which a suggested budget exceeds the measured time."""
GOOD_R2 = 0.95
"""Minimum R squared of a latency model that distinguishes configurations well."""
NOISE_PERCENTILE = "90"
"""Percentile of single runs that measures the noise of a measurement."""
QUIET = 1.2
"""Ratio to the prediction below which 90% of the runs are on an idle machine."""
MAX_MEASUREMENTS = 4
"""Maximum number of attempts at an undisturbed measurement."""
FITTED_SHARE = 0.8
"""Share of the configurations on which the coefficients are fitted."""


# The model


def vision_features(num_patches: int) -> list[float]:
    """Values of `FEATURES["vision_ms"]`."""
    return [1, num_patches, num_patches**2]


def workload_features(workload: RunWorkload) -> dict[str, list[float]]:
    """Values of all `FEATURES`."""
    blocks, experts = workload.configuration.num_active, sum(workload.configuration.topk)
    tokens, decoded = workload.num_prompt_tokens, workload.num_decoded
    context = tokens + decoded / 2
    return {
        "vision_ms": vision_features(workload.num_patches),
        "prefill_ms": [1, tokens, blocks, blocks * tokens, blocks * tokens**2, experts, experts * tokens],
        "decode_ms": [decoded, blocks * decoded, blocks * context * decoded, experts * decoded],
    }


@dataclass(frozen=True)
class LatencyModel:
    """Predicts latencies of workloads.

    Attributes:
        coefficients: coefficients of each part, by the names in `FEATURES`.
        r2: R squared of the total latency on held-out configurations.
        machine: machine on which the model was fitted.
        model: fingerprint of the vision-language model.
        deciding_ms: time of a decision by the controller.
        scatter: ratio of single runs to their predictions, by percentile of `PERCENTILES`.
    """

    coefficients: dict[str, dict[str, float]]
    r2: float
    machine: str
    model: str
    deciding_ms: float = 0.0
    scatter: dict[str, float] = field(default_factory=dict)

    def predict(self, workload: RunWorkload) -> Latency:
        """Predict the latency of a workload."""
        features = workload_features(workload)
        parts = {
            part: float(np.dot(features[part], [self.coefficients[part][name] for name in names]))
            for part, names in FEATURES.items()
        }
        return Latency(**parts, num_decoded=workload.num_decoded)

    def vision_ms(self, num_patches: int) -> float:
        """Predict the time to encode an image with this number of patches."""
        weights = self.coefficients["vision_ms"]
        return sum(weights[name] * value for name, value in zip(FEATURES["vision_ms"], vision_features(num_patches)))

    def save(self, path: Path) -> None:
        """Write the model as JSON, atomically.

        Raises:
            UserError: the file cannot be written.
        """
        with write_errors(path):
            replace_file(path, [json.dumps(asdict(self), indent=2) + "\n"])

    @classmethod
    def load(cls, path: Path) -> LatencyModel:
        """Read a file written by `save`.

        Raises:
            UserError: the file is missing, or is not a latency model.
        """
        try:
            model = cls(**parse_json(path.read_text(encoding="utf-8")))
            if {part: tuple(names) for part, names in model.coefficients.items()} != FEATURES:
                raise ValueError("its coefficients have other names")
            for name in ("machine", "model"):
                if not isinstance(getattr(model, name), str):
                    raise TypeError(f"its {name} is not text")
            _require_number("r2", model.r2, least=-math.inf)
            _require_number("deciding_ms", model.deciding_ms)
            for name, numbers in {**model.coefficients, "scatter": model.scatter}.items():
                for key, value in numbers.items():
                    _require_number(f"{name} of {key}", value)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a latency model ({error}); create one with `python -m verl_ext.controller.calibrate`"
            ) from error
        return model


def _require_number(name: str, value: Any, least: float = 0.0) -> None:
    """Refuse a value that is not a finite number of at least `least`."""
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= least):
        raise ValueError(f"its {name} is {value!r}, not a finite number{' of at least 0' * (least == 0)}")


def fit_coefficients(workloads: Sequence[RunWorkload], latencies: Sequence[Latency]) -> dict[str, dict[str, float]]:
    """Fit non-negative coefficients that minimize the squared relative error over some runs."""
    coefficients, features = {}, [workload_features(workload) for workload in workloads]
    for part, names in FEATURES.items():
        rows = np.array([each[part] for each in features], dtype=float)
        times = np.array([getattr(latency, part) for latency in latencies])
        used = times > 0  # an answer of one token has no decode time
        if not used.any():
            coefficients[part] = dict.fromkeys(names, 0.0)
            continue
        rows = rows[used] / times[used, None]
        scale = np.abs(rows).max(axis=0)
        scale[scale == 0] = 1.0
        weights, _ = nnls(rows / scale, np.ones(int(used.sum())))
        coefficients[part] = dict(zip(names, (weights / scale).tolist()))
    return coefficients


def r2_score(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """R squared: the share of the measurements' variance that the predictions explain.

    If the measurements are equal, there is no variance: 1 if the predictions are exact, else 0, as in scikit-learn.
    """
    truth, guess = np.asarray(measured), np.asarray(predicted)
    error, variance = ((truth - guess) ** 2).sum(), ((truth - truth.mean()) ** 2).sum()
    return float(1 - error / variance) if variance else float(error == 0)


# Sources of latencies


class LatencySource(ABC):
    """Provides the latency of the parts of an adaptive answer, in milliseconds."""

    is_measured: bool
    """Whether latencies are measured, so that they change when a run is repeated."""

    @property
    @abstractmethod
    def deciding_ms(self) -> float:
        """Time of a decision that was not measured itself, without encoding the image at the lowest tier."""

    @property
    def median_deciding_ms(self) -> float:
        """Like `deciding_ms`, to add to a measured run, which is at no particular percentile."""
        return self.deciding_ms

    @abstractmethod
    def run_ms(self, result: RunResult) -> float:
        """Time to run a configuration, including the encoding of the image."""

    @abstractmethod
    def encode_ms(self, low: EncodedImage) -> float:
        """Time to encode an image at the lowest tier, which a decision needs."""

    @abstractmethod
    def deciding_ms_of(self, decision: Decision) -> float:
        """Time of a decision, without that encoding."""


@dataclass(frozen=True)
class MeasuredLatency(LatencySource):
    """Measured latencies."""

    deciding_ms: float = 0.0
    is_measured = True

    def run_ms(self, result: RunResult) -> float:
        return result.latency.total_ms

    def encode_ms(self, low: EncodedImage) -> float:
        return low.vision_ms

    def deciding_ms_of(self, decision: Decision) -> float:
        return decision.deciding_ms


@dataclass(frozen=True)
class ModeledLatency(LatencySource):
    """Latencies from a latency model, which are reproducible.

    Attributes:
        model: latency model that was fitted on this machine for this vision-language model.
        percentile: percentile of single runs to predict; 50 gives the fitted time.
    """

    model: LatencyModel
    percentile: int = 50
    is_measured = False

    @classmethod
    def load(cls, path: Path, adapter: VLMAdapter, percentile: int = 50) -> ModeledLatency:
        """Load the latency model of a file.

        Raises:
            UserError: the file is missing, or was fitted on another vision-language model.
        """
        model = LatencyModel.load(path)
        if not matches_fingerprint(model.model, adapter):
            raise UserError(
                f"{path} was fitted on another model or dtype; create one for this model with "
                f"`python -m verl_ext.controller.calibrate --dtype {precision_of(adapter)}`"
            )
        if percentile != 50 and str(percentile) not in model.scatter:
            raise UserError(
                f"{path} does not record how far single runs are from its predictions; create it again with `python -m "
                "verl_ext.controller.calibrate`, or set latency.percentile=50"
            )
        return cls(model, percentile)

    @property
    def _factor(self) -> float:
        """Ratio of the percentile to the fitted time."""
        return 1.0 if self.percentile == 50 else self.model.scatter[str(self.percentile)]

    @property
    def deciding_ms(self) -> float:
        return self._factor * self.model.deciding_ms

    @property
    def median_deciding_ms(self) -> float:
        return self.model.deciding_ms

    def run_ms(self, result: RunResult) -> float:
        return self._factor * self.model.predict(result.workload).total_ms

    def encode_ms(self, low: EncodedImage) -> float:
        return self._factor * self.model.vision_ms(low.num_patches)

    def deciding_ms_of(self, decision: Decision) -> float:
        return self.deciding_ms


def require_reachable(
    setting: str, lowest_ms: float, cheapest_ms: Sequence[float], full_ms: float | None = None
) -> None:
    """Refuse budgets that no configuration can meet for most questions.

    Args:
        setting: option or key that sets the budgets.
        cheapest_ms: latency of the cheapest configuration including the decision, for some questions.
        full_ms: latency of the full configuration if the budgets are fractions of it, else None.

    Raises:
        UserError: the lowest budget is below the median of `cheapest_ms`.
    """
    needed_ms = statistics.median_high(cheapest_ms)
    if lowest_ms >= needed_ms:
        return
    begins, enough = f"{lowest_ms:g} ms", f"{needed_ms * MARGIN:.1f} ms"
    if full_ms is not None:
        begins, enough = f"{lowest_ms / full_ms:g} ({lowest_ms:.1f} ms)", f"{needed_ms * MARGIN / full_ms:.3g}"
    raise UserError(
        f"{setting} starts at {begins}, but the cheapest configuration and the decision for it take {needed_ms:.1f} "
        f"ms; start at {enough} or more"
    )


# Fitting the model on this machine


def calibrate(
    adapter: VLMAdapter,
    space: ConfigurationSpace,
    questions: Sequence[ImageQuestion],
    num_configurations: int,
    repeats: int,
    max_new_tokens: int,
    hidden: int = 256,
) -> LatencyModel:
    """Measure runs and fit a latency model; repeat while the machine is busy, and keep the least disturbed fit.

    Args:
        num_configurations: number of configurations to run, at least ten.
        repeats: runs of each configuration; the median is used.
        hidden: width of the controller whose decisions are measured.
    """
    rng, runner = random.Random(0), VLMRunner(adapter, max_new_tokens)
    runner.warm_up(questions[0].load_image(), questions[0].question, space)
    runs = [(rng.choice(questions), space.sample(rng)) for _ in range(num_configurations)]
    deciding_ms = measure_deciding_ms(runner, space, questions, hidden)
    fits: list[tuple[float, LatencyModel]] = []
    for attempts_left in reversed(range(MAX_MEASUREMENTS)):
        model, noisy_ms = fit_latency_model(measure_runs(runner, runs, repeats), adapter, deciding_ms)
        fits.append((noisy_ms, model))
        ratio = model.scatter[NOISE_PERCENTILE]
        if ratio <= QUIET or not attempts_left:
            break
        print_line(f"the machine is busy: 10% of runs take over {ratio:.2f} times the predicted time; measuring again")
    return min(fits, key=lambda each: each[0])[1]


def measure_runs(
    runner: VLMRunner, runs: Sequence[tuple[ImageQuestion, Configuration]], repeats: int
) -> list[list[RunResult]]:
    """Run all runs in several passes, so that a slow period affects all of them; return the results of each run."""
    results: list[list[RunResult]] = [[] for _ in runs]
    with progress_bar(total=repeats * len(runs), desc="calibrating", unit="runs") as bar:
        for _ in range(repeats):
            for run, found in zip(runs, results):
                found.append(runner.run_uncached(*run))
                bar.update()
    return results


def fit_latency_model(
    results: Sequence[Sequence[RunResult]], adapter: VLMAdapter, deciding_ms: float
) -> tuple[LatencyModel, float]:
    """Fit a latency model, and return it with the mean of its predictions at `NOISE_PERCENTILE` in milliseconds.

    Args:
        results: results of each run, one per pass.
        deciding_ms: time of a decision.
    """
    workloads = [each[0].workload for each in results]
    latencies = [median_latency([result.latency for result in each]) for each in results]
    cut = round(FITTED_SHARE * len(results))
    coefficients = fit_coefficients(workloads[:cut], latencies[:cut])
    model = LatencyModel(coefficients, 0.0, measured_on(adapter), fingerprint(adapter.model), deciding_ms)
    predictions = [model.predict(workload).total_ms for workload in workloads]
    r2 = r2_score(predictions[cut:], [latency.total_ms for latency in latencies[cut:]])
    ratios = [result.latency.total_ms / predicted for each, predicted in zip(results, predictions) for result in each]
    scatter = {str(percentile): float(np.percentile(ratios, percentile)) for percentile in PERCENTILES}
    return replace(model, r2=r2, scatter=scatter), statistics.fmean(predictions) * scatter[NOISE_PERCENTILE]


def measure_deciding_ms(
    runner: VLMRunner, space: ConfigurationSpace, questions: Sequence[ImageQuestion], hidden: int
) -> float:
    """Median time of a decision by a controller of width `hidden`; it does not depend on the weights."""
    vision, language = runner.features(questions[0])
    widths: dict[str, Any] = {"vision_width": len(vision), "language_width": len(language), "hidden": hidden}
    with torch.random.fork_rng(devices=[]):
        controller = BudgetController(BudgetControllerConfig(**vars(space), **widths))
    model = AdaptiveModel(runner, controller)
    low = [(runner.encoded(question, 0), question.question) for question in questions]
    model.decide(*low[0], 1.0)  # warm-up
    return statistics.median(model.decide(*each, 1.0).deciding_ms for each in low)


def warn_of_bad_fit(model: LatencyModel, path: Path) -> None:
    """Warn if the predictions of a latency model are poor."""
    if model.r2 < GOOD_R2:
        warn(
            f"the R squared of {path} is {model.r2:.3f}, below {GOOD_R2}: the machine was busy, or there are too few "
            "measurements. Remove the file, and fit it again on an idle machine or with more configurations"
        )


def machine_name(adapter: VLMAdapter) -> str:
    """The hardware that determines latencies: the GPU, or the CPU with torch's number of threads."""
    if adapter.model.device.type == "cuda":
        return torch.cuda.get_device_name(adapter.model.device)
    parts = [f"{torch.get_num_threads()} threads", platform.machine(), cpu_name()]
    return ", ".join(part for part in parts if part)


def measured_on(adapter: VLMAdapter) -> str:
    """What determines latencies apart from the model: the hardware and the dtype."""
    return f"{machine_name(adapter)}, {precision_of(adapter)}"


def warn_of_other_machine(model: LatencyModel, adapter: VLMAdapter) -> None:
    """Warn if a latency model was fitted on another machine, in another dtype, or with another number of threads."""
    here = measured_on(adapter)
    if here.startswith(model.machine):  # an old file lacks the dtype and may lack the processor's name, which are last
        return
    threads = "" if adapter.model.device.type == "cuda" else f"OMP_NUM_THREADS={torch.get_num_threads()} "
    warn(
        f"the latency model was fitted on '{model.machine}'; on '{here}' its predictions may be wrong. To fit a model "
        f"here, run `{threads}python -m verl_ext.controller.calibrate --dtype {precision_of(adapter)}`"
    )
