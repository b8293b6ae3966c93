"""Which parameters are trained on, validated on and held out; no problem is on two sides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from verl_ext.data.prepare.files import Row
from verl_ext.data.prepare.quickstart.family import Family, Parameters
from verl_ext.data.prepare.quickstart.flawed_families import FLAWED_FAMILIES
from verl_ext.data.prepare.quickstart.problems import problem_id, to_sample
from verl_ext.data.prepare.quickstart.sound_families import SOUND_FAMILIES

FAMILIES = (*SOUND_FAMILIES, *FLAWED_FAMILIES)
HELD_OUT_PER_FAMILY = 6
PROMPTS_PER_FAMILY = 60
VAL_PROMPTS_PER_FAMILY = 4
VAL_FRACTION = 0.02
# Some problems are kept for training however many samples are asked for.
MAX_VAL_PER_FAMILY = 100
# Most answers of a flawed family are wrong, so greedy decoding repeats the mistake; enough are right that sampling
# finds them, which is what GRPO needs.
BUGGY_SHARE = 0.75


@dataclass(frozen=True)
class Dataset:
    """Rows to train and to validate on, and the problems that neither contains.

    Attributes:
        train: chats.
        val: chats.
        held_out: problems for the evaluation of checkpoints.
        prompts: problems to learn from by rewards; none is held out, none is twice there.
        val_prompts: problems to measure rewards on, which none of the others contains.
    """

    train: list[Row]
    val: list[Row]
    held_out: list[tuple[Family, Parameters]]
    prompts: list[tuple[Family, Parameters]]
    val_prompts: list[tuple[Family, Parameters]]


def sample_dataset(num_train: int, seed: int) -> Dataset:
    """Draw everything; the same arguments give the same rows in the same order.

    Args:
        num_train: training rows; validation gets 2 % more. Families take turns, so each gets the same share.
        seed: seed of the draws and of the order.
    """
    generator = random.Random(seed)
    train: list[Row] = []
    val: list[Row] = []
    held_out: list[tuple[Family, Parameters]] = []
    num_val = min(max(round(num_train * VAL_FRACTION), 1), MAX_VAL_PER_FAMILY * len(FAMILIES))
    for index, family in enumerate(FAMILIES):
        seen: set[str] = set()
        held_out += [(family, item) for item in _draw_new(family, HELD_OUT_PER_FAMILY, seen, generator)]
        val += [_answer(family, item, generator) for item in _draw_new(family, _share(num_val, index), seen, generator)]
        train += [_answer(family, item, generator) for item in _draw(family, _share(num_train, index), seen, generator)]
    generator.shuffle(train)
    generator.shuffle(val)
    return Dataset(train, val, held_out, *_draw_prompts(held_out, generator))


def _draw_prompts(
    held_out: list[tuple[Family, Parameters]], generator: random.Random
) -> tuple[list[tuple[Family, Parameters]], list[tuple[Family, Parameters]]]:
    """Problems of each family, first those to learn from and then those to measure by."""
    prompts: list[tuple[Family, Parameters]] = []
    val_prompts: list[tuple[Family, Parameters]] = []
    for family in FAMILIES:
        seen = {problem_id(other, item) for other, item in held_out}
        prompts += [(family, item) for item in _draw_new(family, PROMPTS_PER_FAMILY, seen, generator)]
        val_prompts += [(family, item) for item in _draw_new(family, VAL_PROMPTS_PER_FAMILY, seen, generator)]
    generator.shuffle(prompts)
    generator.shuffle(val_prompts)
    return prompts, val_prompts


def _share(total: int, index: int) -> int:
    return len(range(index, total, len(FAMILIES)))


def _draw_new(family: Family, count: int, seen: set[str], generator: random.Random) -> Iterator[Parameters]:
    """Draw different parameters, adding them to `seen`."""
    for _ in range(count):
        (parameters,) = _draw(family, 1, seen, generator)
        seen.add(problem_id(family, parameters))
        yield parameters


def _draw(family: Family, count: int, seen: set[str], generator: random.Random) -> Iterator[Parameters]:
    """Draw parameters that are not in `seen`; they may repeat among themselves."""
    while count > 0:
        parameters = family.draw(generator)
        if problem_id(family, parameters) not in seen:
            yield parameters
            count -= 1


def _answer(family: Family, parameters: Parameters, generator: random.Random) -> Row:
    buggy = family.buggy_solution(parameters)
    if buggy is not None and generator.random() < BUGGY_SHARE:
        return to_sample(family, parameters, buggy)
    return to_sample(family, parameters, family.solution(parameters))
