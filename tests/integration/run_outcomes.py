"""What a run must have come to, however often it was killed: what the same run without a disturbance came to."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.integration.runs import NUM_STEPS, Run
from verl_ext.checkpoint.shards import local_part
from verl_ext.checkpoint.verify import damaged_files


@functools.cache
def uninterrupted(quickstart: Path) -> Run:
    """A run that nothing disturbed; made once for all tests of a session."""
    run = Run(quickstart, quickstart.with_name("uninterrupted"))
    result = run.start()
    assert result.returncode == 0, result.stderr
    assert sorted(run.losses(1)) == list(range(1, NUM_STEPS + 1))
    return run


def assert_goes_on(run: Run, quickstart: Path, step: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Start a run again: it goes on from `step` and ends as if nothing had happened.

    Args:
        run: of any number of starts.
        quickstart: of the fixture of that name.
        step: of the checkpoint.
        overrides: of the recipe, for this start.

    Returns:
        The command's output.
    """
    result = run.start(*overrides)
    assert result.returncode == 0, result.stderr
    assert f"Found checkpoint: {run.run_dir}/global_step_{step}\n" in result.stdout
    assert_is_undisturbed(run, quickstart, step)
    return result


def assert_is_undisturbed(run: Run, quickstart: Path, begun_at: int) -> None:
    """A finished run's losses, last checkpoint and directory are those of the uninterrupted one.

    Args:
        run: of any number of starts.
        quickstart: of the fixture of that name.
        begun_at: the step at which the last start began.
    """
    undisturbed = uninterrupted(quickstart)
    expected, number = undisturbed.losses(1), len(run.attempts())
    for attempt in range(1, number):
        assert run.losses(attempt).items() <= expected.items(), (run.losses(attempt), expected)
    losses = run.losses(number)
    assert losses == {step: loss for step, loss in expected.items() if step > begun_at}, (losses, expected)
    assert run.tracker() == str(NUM_STEPS)
    assert all(name.isdigit() for name in run.names()), run.names()
    assert [damaged_files(path) for path in run.run_dir.glob("global_step_*")] == [{}] * len(run.names())
    assert_same_checkpoint(run.last_checkpoint, undisturbed.last_checkpoint)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Every tensor of the shards, random states included, and every byte of the export is the same."""
    for path in one.glob("*_rank_*.pt"):
        # The files themselves differ: pickle notes which of the equal objects are the same one.
        mine, others = (tensors_of(torch.load(d / path.name, weights_only=False)) for d in (one, other))
        assert len(mine) == len(others)
        assert all(map(torch.equal, mine, others)), path.name
    for path in (one / "huggingface").iterdir():
        assert path.read_bytes() == (other / "huggingface" / path.name).read_bytes(), path.name


def tensors_of(state: Any) -> list[torch.Tensor]:
    """The tensors in nested state, in their order, as far as the rank that saved them held them."""
    if isinstance(state, torch.Tensor):
        return [local_part(state)]
    if isinstance(state, dict):
        return tensors_of(list(state.values()))
    return [tensor for item in state for tensor in tensors_of(item)] if isinstance(state, list | tuple) else []
