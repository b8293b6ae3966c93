"""Measures how long a model takes under random configurations, and fits the latency model to the times."""

from __future__ import annotations

import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl_ext.console import print_line, progress_bar
from verl_ext.controller.adapters import VLMAdapter
from verl_ext.controller.config import PERCENTILES
from verl_ext.controller.execution import RunResult, VLMRunner, median_latency
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.latency import LatencyModel, fit_coefficients, r2_score
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.controller.vlm import fingerprint
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.processes import cpu_name

GOOD_R2 = 0.95
"""R squared from which a latency model distinguishes configurations well."""
NOISE_PERCENTILE = "90"
"""Percentile of single runs by which a measurement is judged."""
QUIET = 1.2
"""Ratio to the prediction that nine tenths of the runs stay below on an undisturbed machine."""
MAX_MEASUREMENTS = 4
"""Attempts at an undisturbed measurement."""
FITTED_SHARE = 0.8
"""Share of the configurations on which the coefficients are fitted."""


def calibrate(
    adapter: VLMAdapter,
    space: ConfigurationSpace,
    questions: Sequence[ImageQuestion],
    num_configurations: int,
    repeats: int,
    max_new_tokens: int,
    hidden: int = 256,
    seed: int = 0,
) -> LatencyModel:
    """Measure and fit; repeat while the machine is disturbed, and keep the fastest and calmest measurement.

    Args:
        adapter: of the model.
        space: from which configurations are sampled.
        questions: to run them on.
        num_configurations: number of runs, at least ten.
        repeats: passes over all runs; the median of each run counts.
        max_new_tokens: of an answer.
        hidden: width of the controller.
        seed: of the configurations.
    """
    rng, runner = random.Random(seed), VLMRunner(adapter, max_new_tokens)
    runner.warm_up(questions[0].load_image(), questions[0].question, space)
    runs = [(rng.choice(questions), space.sample(rng)) for _ in range(num_configurations)]
    own_ms = measure_deciding_ms(runner, space, questions, hidden)
    fits: list[tuple[float, LatencyModel]] = []
    for attempts_left in reversed(range(MAX_MEASUREMENTS)):
        model, noisy_ms = fit_latency_model(measure_runs(runner, runs, repeats), adapter, own_ms)
        fits.append((noisy_ms, model))
        ratio = model.scatter[NOISE_PERCENTILE]
        if ratio <= QUIET or not attempts_left:
            break
        print_line(f"the machine is busy: a tenth of the runs take {ratio:.2f} times as long; measuring again")
    return min(fits, key=lambda each: each[0])[1]


def measure_runs(
    runner: VLMRunner, runs: Sequence[tuple[ImageQuestion, Configuration]], repeats: int
) -> list[list[RunResult]]:
    """The results of each run, one per pass.

    Args:
        runner: of the model.
        runs: questions, each with a configuration.
        repeats: passes over all runs, so that a slow period of the machine affects all of them.
    """
    results: list[list[RunResult]] = [[] for _ in runs]
    bar = progress_bar(total=repeats * len(runs), desc="calibrating", unit="runs")
    for _ in range(repeats):
        for number, run in enumerate(runs):
            results[number].append(runner.run_uncached(*run))
            bar.update()
    bar.close()
    return results


def fit_latency_model(
    results: Sequence[Sequence[RunResult]], adapter: VLMAdapter, own_ms: float
) -> tuple[LatencyModel, float]:
    """The latency model of measured runs, and the mean of its predictions at `NOISE_PERCENTILE`, in milliseconds.

    Args:
        results: see `measure_runs`.
        adapter: of the model.
        own_ms: time of a decision.
    """
    workloads = [each[0].workload for each in results]
    latencies = [median_latency([result.latency for result in each]) for each in results]
    cut = round(FITTED_SHARE * len(results))
    coefficients = fit_coefficients(workloads[:cut], latencies[:cut])
    model = LatencyModel(coefficients, 0.0, machine_name(adapter), fingerprint(adapter.model), own_ms)
    predictions = [model.predict(workload).total_ms for workload in workloads]
    r2 = r2_score(predictions[cut:], [latency.total_ms for latency in latencies[cut:]])
    model = replace(model, r2=r2, scatter=run_ratio_percentiles(results, predictions))
    return model, statistics.fmean(predictions) * model.scatter[NOISE_PERCENTILE]


def run_ratio_percentiles(results: Sequence[Sequence[RunResult]], predictions: Sequence[float]) -> dict[str, float]:
    """By percentile, the ratio of single runs to their predictions."""
    ratios = [result.latency.total_ms / predicted for each, predicted in zip(results, predictions) for result in each]
    return {str(percentile): float(np.percentile(ratios, percentile)) for percentile in PERCENTILES}


def measure_deciding_ms(
    runner: VLMRunner, space: ConfigurationSpace, questions: Sequence[ImageQuestion], hidden: int
) -> float:
    """Median time of one decision, which does not depend on the controller's weights.

    Args:
        runner: of the model.
        space: of the configurations.
        questions: to decide about.
        hidden: width of the controller.
    """
    vision, language = runner.features(questions[0])
    widths: dict[str, Any] = {"vision_width": len(vision), "language_width": len(language), "hidden": hidden}
    with torch.random.fork_rng(devices=[]):
        controller = BudgetController(BudgetControllerConfig(**vars(space), **widths))
    model = AdaptiveModel(runner, controller)
    low = [(runner.encoded(question, 0), question.question) for question in questions]
    model.decide(*low[0], 1.0)  # warm-up
    return statistics.median(model.decide(*each, 1.0).own_ms for each in low)


def r2_warning(r2: float) -> str:
    """What to print after an R squared; empty for a good one."""
    return "" if r2 >= GOOD_R2 else f", below {GOOD_R2}: the machine was busy, or more measurements are needed"


def machine_name(adapter: VLMAdapter) -> str:
    """The hardware on which latencies depend: the GPU, or the CPU with torch's number of threads."""
    if adapter.model.device.type == "cuda":
        return torch.cuda.get_device_name(adapter.model.device)
    parts = [f"{torch.get_num_threads()} threads", platform.machine(), cpu_name()]
    return ", ".join(part for part in parts if part)


def machine_warning(model: LatencyModel, adapter: VLMAdapter) -> str | None:
    """A warning if a latency model was fitted on another machine, or with another number of threads; else None.

    Args:
        model: the latency model.
        adapter: of the vision-language model, on this machine.
    """
    here = machine_name(adapter)
    if here.startswith(model.machine):  # files of earlier versions lack the processor's name
        return None
    threads = "" if adapter.model.device.type == "cuda" else f"OMP_NUM_THREADS={torch.get_num_threads()} "
    return (
        f"the latency model was fitted on '{model.machine}'; on '{here}' its predictions may be wrong. To fit one "
        f"here, run `{threads}python -m verl_ext.controller.calibrate`"
    )
