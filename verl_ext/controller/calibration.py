"""Measures how long a model takes under configurations, and fits the latency model to it."""

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
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.execution import Executor, Outcome
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.latency import median_of
from verl_ext.controller.latency_model import PERCENTILES, LatencyModel, explained, fit
from verl_ext.controller.loading import fingerprint
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.processes import cpu_name

GOOD_R2 = 0.95
"""From which on a latency model tells configurations apart well."""
TOLD = "90"
"""Percentile of single runs by which a measurement is judged."""
CALM = 1.2
"""Times the latency model that nine tenths of the runs keep on a machine that nothing disturbs."""
MOST_MEASUREMENTS = 4
"""Tries at finding it so."""
FITTED = 0.8
"""Share of the configurations that the coefficients are fitted to."""

Draw = tuple[ImageQuestion, Configuration]


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
    """Measure and fit, again while the machine is disturbed; of several measurements the quickest and calmest counts.

    Args:
        adapter: of the model.
        space: that configurations are drawn from.
        questions: to run them for.
        num_configurations: to run, at least ten.
        repeats: passes over them; the median of each counts.
        max_new_tokens: of an answer.
        hidden: width of the controller.
        seed: of the draws.
    """
    rng, executor = random.Random(seed), Executor(adapter, max_new_tokens)
    for tier in range(len(space.tiers)):  # the first run at a size is not warm
        executor.run_anew(questions[0], space.configuration(tier, [True] * space.num_blocks))
    draws = [(rng.choice(questions), space.draw(rng)) for _ in range(num_configurations)]
    own_ms = deciding_ms(executor, space, questions, hidden)
    kept: list[tuple[float, LatencyModel]] = []
    for left in reversed(range(MOST_MEASUREMENTS)):
        found, told_ms = fitted(measured(executor, draws, repeats), adapter, own_ms)
        kept.append((told_ms, found))
        if found.scatter[TOLD] <= CALM or not left:
            break
        print_line(
            f"the machine is busy: a tenth of the runs take {found.scatter[TOLD]:.2f} times as long; measuring again"
        )
    return min(kept, key=lambda each: each[0])[1]


def fitted(runs: Sequence[Sequence[Outcome]], adapter: VLMAdapter, own_ms: float) -> tuple[LatencyModel, float]:
    """The latency model of some runs, and what it tells on average that nine tenths of them keep, in milliseconds.

    Args:
        runs: of each draw.
        adapter: of the model.
        own_ms: what deciding takes.
    """
    workloads = [each[0].workload for each in runs]
    latencies = [median_of([outcome.latency for outcome in each]) for each in runs]
    cut = round(FITTED * len(runs))
    found = LatencyModel(
        fit(workloads[:cut], latencies[:cut]), 0.0, machine_name(adapter), fingerprint(adapter.model), own_ms
    )
    predictions = [found.predict(workload).total_ms for workload in workloads]
    r2 = explained(predictions[cut:], [latency.total_ms for latency in latencies[cut:]])
    found = replace(found, r2=r2, scatter=scatter(runs, predictions))
    return found, statistics.fmean(predictions) * found.scatter[TOLD]


def measured(executor: Executor, draws: Sequence[Draw], repeats: int) -> list[list[Outcome]]:
    """What each draw gave, time after time.

    Args:
        executor: runs them.
        draws: questions with a configuration for each.
        repeats: passes over all of them.
    """
    outcomes: list[list[Outcome]] = [[] for _ in draws]
    bar = progress_bar(total=repeats * len(draws), desc="calibrating", unit="runs")
    for _ in range(repeats):
        for number, draw in enumerate(draws):
            outcomes[number].append(executor.run_anew(*draw))
            bar.update()
    bar.close()
    return outcomes


def scatter(runs: Sequence[Sequence[Outcome]], predictions: Sequence[float]) -> dict[str, float]:
    """By percentile, how many times its prediction a single run took."""
    ratios = [outcome.latency.total_ms / told for each, told in zip(runs, predictions) for outcome in each]
    return {str(percentile): float(np.percentile(ratios, percentile)) for percentile in PERCENTILES}


def deciding_ms(
    executor: Executor, space: ConfigurationSpace, questions: Sequence[ImageQuestion], hidden: int
) -> float:
    """What a controller itself takes for a question, the median; it does not depend on what it has learnt.

    Args:
        executor: of the model.
        space: that it chooses from.
        questions: to decide about.
        hidden: the controller's width.
    """
    vision, language = executor.features(questions[0])
    widths: dict[str, Any] = {"vision_width": len(vision), "language_width": len(language), "hidden": hidden}
    with torch.random.fork_rng(devices=[]):
        controller = BudgetController(BudgetControllerConfig(**vars(space), **widths))
    model = AdaptiveModel(executor, controller)
    low = [(executor.seen(question, 0), question.question) for question in questions]
    model.decide(*low[0], 1.0)  # not warm
    return statistics.median(model.decide(*each, 1.0).own_ms for each in low)


def doubts(r2: float) -> str:
    """What is to be said behind an R squared; nothing of a good one."""
    return "" if r2 >= GOOD_R2 else f", below {GOOD_R2}: the machine was busy, or it should be measured more often"


def machine_name(adapter: VLMAdapter) -> str:
    """What latencies hold for: the GPU, or the CPU with torch's number of threads."""
    if adapter.model.device.type == "cuda":
        return torch.cuda.get_device_name(adapter.model.device)
    parts = [f"{torch.get_num_threads()} threads", platform.machine(), cpu_name()]
    return ", ".join(part for part in parts if part)


def other_machine(model: LatencyModel, adapter: VLMAdapter) -> str | None:
    """What to warn of if a latency model was fitted on another machine, or with another number of threads.

    Args:
        model: that is to be used.
        adapter: of the vision-language model, where it is to be used.
    """
    here = machine_name(adapter)
    if here.startswith(model.machine):  # files of earlier versions lack the processor's name
        return None
    threads = "" if adapter.model.device.type == "cuda" else f"OMP_NUM_THREADS={torch.get_num_threads()} "
    return (
        f"the latency model was fitted on '{model.machine}'; on '{here}' its predictions may be wrong. To fit one "
        f"here, run `{threads}python -m verl_ext.controller.calibrate`"
    )
