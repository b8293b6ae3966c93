"""What ranks do together: work on one of them or on all, with a failure known to every rank, so that none waits."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from verl_ext.errors import UserError

T = TypeVar("T")


def gather_results(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank and return all results in the order of the ranks; collective.

    Args:
        function: may raise; its result must be picklable.
        group: the ranks; None means all.

    Raises:
        UserError: a rank raised one; the first rank's is raised on all.
        RuntimeError: a rank raised anything else; the message holds its traceback.
    """
    outcome: tuple[Any, str, str] = (None, "", "")
    try:
        outcome = (function(), "", "")
    except UserError as error:
        outcome = (None, "user", str(error))
    except Exception:  # the others wait in the gathering below, so it must reach them whatever it is
        outcome = (None, "crash", traceback.format_exc())
    outcomes: list[tuple[Any, str, str]] = [(None, "", "")] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    _raise_first(outcomes)
    return [result for result, _, _ in outcomes]


def _raise_first(outcomes: list[tuple[Any, str, str]]) -> None:
    for rank, (_, kind, message) in sorted(enumerate(outcomes), key=lambda item: item[1][1] != "user"):
        if kind == "user":
            raise UserError(message)
        if kind == "crash":
            raise RuntimeError(f"rank {rank} failed:\n{message}")


def on_every_rank(function: Callable[[], T]) -> T:
    """What `function` returns on this rank; a failure of one rank is raised on every rank, see `gather_results`."""
    kept: list[T] = []
    gather_results(lambda: kept.append(function()))
    return kept[0]


def first_of_node_first(function: Callable[[], T]) -> T:
    """As `on_every_rank`, but a node's first rank is done before its others begin, who find what it has left there."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    made = on_every_rank(lambda: function() if is_first else None)
    return on_every_rank(lambda: cast("T", made) if is_first else function())


def on_rank_zero(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """What `function` returns on rank 0, on every rank; its failure is raised on every rank too."""
    is_zero = dist.get_rank(group) == 0
    return cast("T", gather_results(lambda: function() if is_zero else None, group)[0])
