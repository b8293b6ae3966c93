"""From any position of verl's data loader, this pipeline's sampler continues with the next batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.errors import UserError

Batches = list[set[int]]


class OfVerl:
    """The training loaders of all ranks, built as verl 0.7.0 builds them, with fewer workers."""

    def __init__(self, num_samples: int, batch_size: int, ranks: int) -> None:
        samples = range(num_samples)
        self.samplers = [
            DistributedSampler(samples, shuffle=True, num_replicas=ranks, rank=rank, drop_last=True)
            for rank in range(ranks)
        ]
        arguments = {"batch_size": batch_size // ranks, "num_workers": 1, "drop_last": True}
        self.loaders = [StatefulDataLoader(samples, sampler=sampler, **arguments) for sampler in self.samplers]

    def epochs(self, number: int) -> Iterator[tuple[set[int], dict]]:
        """Yield each global batch and the loader state that verl saves after it."""
        for epoch in range(number):
            for sampler in self.samplers:
                sampler.set_epoch(epoch)
            for parts in zip(*self.loaders):
                yield {int(sample) for part in parts for sample in part}, self.loaders[0].state_dict()


def remaining(state: dict, num_samples: int, batch_size: int, ranks: int, number: int) -> Batches:
    """The next global batches of this pipeline's samplers."""
    samplers = [GlobalBatchSampler(num_samples, batch_size, rank, ranks, seed=42) for rank in range(ranks)]
    found: Batches = []
    for sampler in samplers:
        sampler.load_state_dict(state)
    while len(found) < number:
        for parts in zip(*samplers):
            found.append({sample for part in parts for sample in part})
            for sampler in samplers:
                sampler.advance()
            state = samplers[0].state_dict()
    for sampler in samplers:  # its saved state resumes in the same order
        sampler.load_state_dict(state)
    return found[:number]


def state_after_verl(
    loader_state: dict, step: int, num_samples: int, batch_size: int, ranks: int
) -> tuple[dict, str | None]:
    return GlobalBatchSampler(num_samples, batch_size, 0, 1, seed=42).state_after_verl(loader_state, step, ranks)


@pytest.mark.parametrize(("num_samples", "batch_size", "ranks"), [(37, 8, 2), (24, 6, 3), (9, 4, 1)])
def test_next_batch_equals_next_batch_of_verl(num_samples: int, batch_size: int, ranks: int) -> None:
    taken = list(OfVerl(num_samples, batch_size, ranks).epochs(3))
    batches = [batch for batch, _ in taken]
    assert batches[: len(batches) // 3] != batches[len(batches) // 3 : 2 * len(batches) // 3]
    for step, (_, loader_state) in enumerate(taken[:-1], start=1):  # the end of an epoch among them
        for state in (loader_state, {}):  # without data.pt the position follows from the step
            saved, doubt = state_after_verl(state, step, num_samples, batch_size, ranks)
            assert doubt is None
            for own_ranks in (1, ranks):
                left = len(batches) - step
                assert remaining(saved, num_samples, batch_size, own_ranks, left) == batches[step:]


def test_other_batch_size_resumes_if_it_divides_samples_seen() -> None:
    taken = list(OfVerl(40, 8, 2).epochs(2))
    state, doubt = state_after_verl(taken[6][1], 7, 40, 4, 2)  # 2 of 5 batches into the second epoch
    assert (state["epoch"], state["samples_seen"], doubt) == (1, 16, None)
    sampler = GlobalBatchSampler(40, 4, 0, 1, seed=42)
    sampler.load_state_dict(state)
    assert set(next(iter(sampler))) < taken[7][0]
    with pytest.raises(UserError, match="resume with the previous batch size"):
        GlobalBatchSampler(40, 10, 0, 1, seed=42).load_state_dict(state)


def test_other_data_are_detected_from_step_count() -> None:
    taken = list(OfVerl(40, 8, 2).epochs(2))
    state, doubt = state_after_verl(taken[6][1], 7, 48, 8, 2)  # 6 batches an epoch by now
    assert (state["epoch"], state["samples_seen"]) == (1, 8)
    assert "2 batches of 8 samples into an epoch, which contradicts step 7 with 48 samples" in str(doubt)


def test_rejects_seed_of_another_run() -> None:
    sampler = GlobalBatchSampler(40, 8, 0, 1, seed=42)
    sampler.load_state_dict(state_after_verl({}, 3, 40, 8, 2)[0])
    with pytest.raises(UserError, match="seed=42, but this run has 1"):
        GlobalBatchSampler(40, 8, 0, 1, seed=1).load_state_dict(sampler.state_dict())
