"""Which GPUs each worker gets."""

from __future__ import annotations

from eval_pipeline.config import EngineConfig
from verl_ext.errors import UserError
from verl_ext.processes import visible_gpus


def gpus_for_workers(num_workers: int | None, engine: EngineConfig) -> list[str | None]:
    """The devices of each worker of this machine, as `CUDA_VISIBLE_DEVICES` takes them; None where it needs none.

    Args:
        num_workers: as the recipe has it; None takes as many as the GPUs allow, one on a CPU.
        engine: says how many GPUs an engine spans.

    Raises:
        UserError: more workers than the GPUs allow.
    """
    gpus = visible_gpus() if engine.kind == "vllm" else []
    if not gpus:
        return [None] * (num_workers or 1)
    span = engine.tensor_parallel_size
    groups = [",".join(gpus[start : start + span]) for start in range(0, len(gpus) - span + 1, span)]
    if len(groups) < (num_workers or 1):
        raise UserError(
            f"executor.num_workers={num_workers or 1} with engine.tensor_parallel_size={span} needs "
            f"{(num_workers or 1) * span} GPUs, but {len(gpus)} are visible; lower either value"
        )
    return list(groups[: num_workers or len(groups)])
