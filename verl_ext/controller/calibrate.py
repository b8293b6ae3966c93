"""Fits the latency model to this machine.

    python -m verl_ext.controller.calibrate --model DIR --questions FOLDER --output FILE.json

Runs configurations that are drawn evenly, each for one of the questions, all of them several times over, and takes each
one's median: so a while in which the machine is slow has a part in all of them. Four fifths of them are fitted, and R
squared of the total latency is told for the last fifth, which was not. Run it when nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Sequence

import torch
from tqdm import tqdm

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.command import adapter_from, add_model_arguments, questions_from
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.execution import Executor, Outcome
from verl_ext.controller.latency import Latency, median_of
from verl_ext.controller.latency_model import LatencyModel, Workload, explained, fit
from verl_ext.controller.loading import fingerprint
from verl_ext.data.questions import ImageQuestion
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.tell import tell

GOOD_R2 = 0.95
"""From which on a latency model tells configurations apart well."""
FITTED = 0.8
"""Share of the configurations that the coefficients are fitted to."""


def drawn_evenly(space: ConfigurationSpace, rng: random.Random) -> Configuration:
    """A configuration with every tier, every number of blocks and every number of experts as likely as the others."""
    others = rng.randint(space.min_active, space.max_active) - 1
    kept = rng.sample(range(1, space.num_blocks), others)
    blocks = [block == 0 or block in kept for block in range(space.num_blocks)]
    topk = [rng.choice(space.topk_choices or (0,)) for _ in range(space.num_blocks)]
    return space.configuration(rng.randrange(len(space.tiers)), blocks, topk)


Draw = tuple[ImageQuestion, Configuration]


def measured(executor: Executor, draws: Sequence[Draw], repeats: int) -> list[tuple[Workload, Latency]]:
    """What each draw had to do, and the median of how long each part of it took.

    Args:
        executor: runs them.
        draws: questions with a configuration for each.
        repeats: passes over all of them.
    """
    outcomes: list[list[Outcome]] = [[] for _ in draws]
    bar = tqdm(total=repeats * len(draws), desc="calibrating", unit="runs", disable=None, mininterval=1)
    for _ in range(repeats):
        for number, draw in enumerate(draws):
            outcomes[number].append(executor.run_anew(*draw))
            bar.update()
    bar.close()
    return [(found[0].workload, median_of([each.latency for each in found])) for found in outcomes]


def calibrate(
    adapter: VLMAdapter,
    space: ConfigurationSpace,
    questions: Sequence[ImageQuestion],
    num_configurations: int,
    repeats: int,
    max_new_tokens: int,
    seed: int = 0,
) -> LatencyModel:
    """Measure and fit.

    Args:
        adapter: of the model.
        space: that configurations are drawn from.
        questions: to run them for.
        num_configurations: to run, at least ten.
        repeats: passes over them; the median of each counts.
        max_new_tokens: of an answer.
        seed: of the draws.
    """
    rng, executor = random.Random(seed), Executor(adapter, max_new_tokens)
    for tier in range(len(space.tiers)):  # the first run at a size is not warm
        executor.run_anew(questions[0], space.configuration(tier, [True] * space.num_blocks))
    draws = [(rng.choice(questions), drawn_evenly(space, rng)) for _ in range(num_configurations)]
    workloads, latencies = zip(*measured(executor, draws, repeats))
    cut = round(FITTED * num_configurations)
    found = LatencyModel(fit(workloads[:cut], latencies[:cut]), 0.0, machine_name(adapter), fingerprint(adapter.model))
    predictions = [found.predict(workload).total_ms for workload in workloads[cut:]]
    r2 = explained(predictions, [latency.total_ms for latency in latencies[cut:]])
    return LatencyModel(found.coefficients, r2, found.machine, found.model)


def doubts(r2: float) -> str:
    """What is to be said behind an R squared; nothing of a good one."""
    return "" if r2 >= GOOD_R2 else f", below {GOOD_R2}: the machine was busy, or it should be measured more often"


def machine_name(adapter: VLMAdapter) -> str:
    """What the figures hold for."""
    if adapter.model.device.type == "cuda":
        return torch.cuda.get_device_name(adapter.model.device)
    return f"{torch.get_num_threads()} threads, {platform.machine()}"


@exit_on_user_error()
def main() -> None:
    """Measure, tell how good the fit is and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--min-active", type=int, default=1, help="fewest blocks that run (default 1)")
    parser.add_argument("--topk-choices", type=int, nargs="*", default=[], help="numbers of experts, ascending")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--configurations", type=int, default=200, help="to run (default 200)")
    parser.add_argument("--repeats", type=int, default=9, help="passes over them; the medians count (default 9)")
    arguments = parser.parse_args()
    if arguments.configurations < 10 or arguments.repeats < 1:
        raise UserError("--configurations must be at least 10 and --repeats at least 1")
    adapter, questions = adapter_from(arguments), questions_from(arguments)
    space = adapter.space(arguments.min_active, len(adapter.blocks), arguments.topk_choices)
    sizes = arguments.configurations, arguments.repeats, arguments.max_new_tokens
    found = calibrate(adapter, space, questions, *sizes)
    for part, weights in found.coefficients.items():
        tell(f"{part}: " + ", ".join(f"{weight:.3g} * {name}" for name, weight in weights.items() if weight))
    tell(f"R squared on configurations that were not fitted: {found.r2:.4f}{doubts(found.r2)}")
    found.save(arguments.output)
    tell(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
