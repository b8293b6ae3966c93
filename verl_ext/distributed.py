"""Collectives, process groups, meshes and sharded tensors; a failure on one rank is raised on every rank."""

from __future__ import annotations

import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_ext.errors import TransientError, UserError

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Long enough for a rank to write a large export to a slow disk while the others wait at the barrier."""
NODE_CHECK_PAUSES_S = (1.0, 4.0, 15.0, 30.0)
"""Waiting times until a file of another node must be visible; NFS caches a directory for up to 60 s by default."""


# Functions on some or all ranks


def gather_results(function: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank and return all results in rank order; collective.

    Args:
        function: may raise; its result must be picklable.
        group: group of the ranks; None means all ranks.

    Raises:
        UserError: a rank raised a `UserError`; the first one is raised on all ranks, also if it is a `TransientError`.
        RuntimeError: a rank raised another exception; the message contains its traceback.
    """
    outcome: tuple[Any, str, str] = (None, "", "")
    try:
        outcome = (function(), "", "")
    except TransientError as error:
        outcome = (None, "transient", str(error))
    except UserError as error:
        outcome = (None, "user", str(error))
    except Exception:  # the other ranks wait in all_gather_object, so any exception must reach them
        outcome = (None, "crash", traceback.format_exc())
    outcomes: list[tuple[Any, str, str]] = [(None, "", "")] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    order = ["user", "transient", "crash", ""]
    for rank, (_, kind, message) in sorted(enumerate(outcomes), key=lambda item: order.index(item[1][1])):
        if kind in ("user", "transient"):
            raise (UserError if kind == "user" else TransientError)(message)
        if kind == "crash":
            raise RuntimeError(f"rank {rank} failed:\n{message}")
    return [result for result, _, _ in outcomes]


def on_every_rank(function: Callable[[], T]) -> T:
    """This rank's result of `function`; a failure on one rank is raised on every rank, see `gather_results`."""
    kept: list[T] = []
    gather_results(lambda: kept.append(function()))
    return kept[0]


def local_rank_zero_first(function: Callable[[], T]) -> T:
    """Like `on_every_rank`, but on each node, the first rank finishes before the others start and find its files."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    result = on_every_rank(lambda: function() if is_first else None)
    return on_every_rank(lambda: cast("T", result) if is_first else function())


def on_rank_zero(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """Run `function` on rank 0 and return its result on every rank; its failure is raised on every rank."""
    is_zero = dist.get_rank(group) == 0
    return cast("T", gather_results(lambda: function() if is_zero else None, group)[0])


def require_same_settings(settings: Mapping[str, Any]) -> None:
    """Refuse a launcher with settings other than those of the first node; collective.

    With another learning rate or number of steps, the ranks of a node would train something else, or wait forever.

    Args:
        settings: values by dotted key. Existing files may have other paths on other nodes, but not other names.

    Raises:
        UserError: a setting differs.
    """
    own = {key: _without_directories(value) for key, value in settings.items()}
    first = on_rank_zero(lambda: own)

    def compare() -> None:
        differing = [key for key in sorted(own.keys() | first.keys()) if own.get(key) != first.get(key)]
        if differing:
            values = ", ".join(f"{key}: {first.get(key)} and {own.get(key)}" for key in differing[:3])
            more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
            node = os.environ.get("GROUP_RANK", "?")
            raise UserError(
                f"the first node and node {node} have different settings ({values}{more}); start the same command on "
                "every node"
            )

    gather_results(compare)


def _without_directories(value: Any) -> Any:
    """Reduce the paths of existing files to their names."""
    if isinstance(value, list):
        return [_without_directories(each) for each in value]
    is_path = isinstance(value, str) and os.sep in value and Path(value).expanduser().exists()
    return Path(value).name if is_path else value


def require_shared_directory(directory: Path) -> None:
    """Refuse a directory that is not the same on all nodes; collective.

    Rank 0 creates an empty file, and the first rank of each node looks for it.

    Args:
        directory: the run directory; its path may differ between nodes.

    Raises:
        UserError: a node has another directory, or rank 0 cannot write it.
    """
    path = directory / on_rank_zero(lambda: _create_node_check(directory))
    try:
        gather_results(lambda: _require_node_check(path) if os.environ.get("LOCAL_RANK", "0") == "0" else None)
    finally:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)


def _create_node_check(directory: Path) -> str:
    path = directory / f"node_check.{secrets.token_hex(8)}.tmp"  # `rotate` removes it if this process is killed
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise UserError(f"the run directory {directory.absolute()} cannot be written ({error.strerror})") from error
    return path.name


def _require_node_check(path: Path) -> None:
    for pause_s in (*NODE_CHECK_PAUSES_S, None):
        if path.name in os.listdir(path.parent):
            return
        if pause_s is not None:
            time.sleep(pause_s)  # NFS caches directories
    raise UserError(
        f"the run directory {path.parent.absolute()} is not the same on node {os.environ.get('GROUP_RANK', '?')} as on "
        "the first node; put it on a file system that all nodes share (trainer.default_local_dir)"
    )


def is_failure_of_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone or late; that rank has the reason."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def lost_connection(error: Exception) -> str | None:
    """Why the connection to another rank was lost, if gloo's collective failed for this; that rank has ended."""
    reasons = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
    found = [reason for reason in reasons if "gloo/transport" in str(error) and reason in str(error)]
    return found[0] if found else None


# Reduction of metrics


def reduce_over_ranks(
    *,
    sums: Mapping[str, float] | None = None,
    maxima: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Reduce each rank's values in float64, with at most one collective for the sums and one for the maxima.

    Every rank must call this with the same names. Without an initialized process group, returns this rank's own values.
    A token-weighted mean is the quotient of two sums.

    Args:
        sums: values to add over the ranks, by name.
        maxima: values whose maximum to take over the ranks, by name; NaN on any rank gives NaN.
        device: device of the tensors; must match the backend (a CUDA device for NCCL).

    Returns:
        The reduced values by name, the same on every rank.
    """
    # sorted, because ranks may have filled their dictionaries in different orders
    sums, maxima = dict(sorted((sums or {}).items())), dict(sorted((maxima or {}).items()))
    assert not sums.keys() & maxima.keys(), "a name is either summed or maximized"
    # backends disagree on the maximum of NaN and a number, so each value has a flag for NaN
    flags = [float(math.isnan(value)) for value in maxima.values()]
    numbers = [-math.inf if flag else value for value, flag in zip(maxima.values(), flags)]
    summed = _all_reduce([*sums.values()], dist.ReduceOp.SUM, device)
    largest = _all_reduce(numbers + flags, dist.ReduceOp.MAX, device)
    found = [math.nan if flag else value for value, flag in zip(largest, largest[len(maxima) :])]
    return {**dict(zip(sums, summed)), **dict(zip(maxima, found))}


def _all_reduce(values: Sequence[float], operation: Any, device: torch.device | str) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers or not (dist.is_available() and dist.is_initialized()):
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


# Process groups and meshes


def local_world_size() -> int:
    """Return the number of ranks on this node, from torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def init_process_group(device_name: str) -> None:
    """Join the ranks that torchrun started, with gloo for CPU tensors and NCCL or HCCL for accelerator tensors.

    Raises:
        UserError: this node has no device for this rank.
    """
    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
    if device_name != "cpu":
        devices, index = getattr(torch, device_name), int(os.environ["LOCAL_RANK"])
        if index >= (num_devices := devices.device_count()):
            raise UserError(
                f"torch finds only {num_devices} devices on this node, which has more ranks; start at most "
                f"{num_devices} ranks per node"
            )
        devices.set_device(index)
    dist.init_process_group(backends[device_name], timeout=COLLECTIVE_TIMEOUT)


def build_meshes(device_name: str, sequence_parallel_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of all ranks for FSDP2, and the (dp, sp) mesh for Ulysses sequence parallelism."""
    world_size = dist.get_world_size()
    flat = init_device_mesh(device_name, (world_size,), mesh_dim_names=("fsdp",))
    shape = (world_size // sequence_parallel_size, sequence_parallel_size)
    return flat, init_device_mesh(device_name, shape, mesh_dim_names=("dp", "sp"))


# Tensors sharded with FSDP2


def shard_rows(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Row range (end exclusive) of a rank's part of a tensor that FSDP2 sharded along its first axis."""
    chunk = -(-num_rows // num_ranks)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def local_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Row range (end exclusive) of this rank's part of a tensor."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not is_sharded(tensor):
        return 0, num_rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # this rank holds a part of it
    return shard_rows(num_rows, tensor.device_mesh.size(), coordinate[0])


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds some rows of a tensor.

    Raises:
        UserError: the tensor is not sharded along the first axis, as FSDP2 does by default.
    """
    if not isinstance(tensor, DTensor) or tensor.placements == (Replicate(),):
        return False
    if tensor.placements != (Shard(0),):
        raise UserError(
            f"a tensor of shape {tuple(tensor.shape)} has the unsupported placements {tensor.placements}; shard it "
            "with FSDP2 (Shard(0))"
        )
    return True


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, as a plain tensor that shares its memory."""
    with torch.no_grad():  # otherwise to_local is a view that autograd tracks
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded tensor, on every rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
