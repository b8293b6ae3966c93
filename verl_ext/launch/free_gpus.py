"""That an evaluation beside a training takes none of the GPUs that its ranks use."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ext.errors import UserError
from verl_ext.processes import listed_gpus, visible_gpus


def require_free_gpus(devices: Sequence[str] | None, num_ranks: int) -> None:
    """Refuse an evaluation on GPUs that the training uses: vLLM takes nearly all memory of those it sees.

    Args:
        devices: `eval.devices`; None leaves the evaluation all GPUs that are visible.
        num_ranks: of this machine; each uses one GPU, the first ones of those that are visible.

    Raises:
        UserError: GPUs are visible and no free ones are named, or one that is named is in use or does not exist.
    """
    listed = listed_gpus()
    used = [_id_of(name, listed) for name in visible_gpus(listed)[:num_ranks]]
    if devices is None:
        if used:
            raise UserError(
                f"eval.watch=true needs GPUs that the {num_ranks} ranks leave free; name them with eval.devices, such "
                "as eval.devices=7, or evaluate after the training with `bash eval_pipeline/run.sh watch`"
            )
        return
    for name in devices:
        if listed and not name.startswith("MIG-") and _id_of(name, listed) not in listed:
            raise UserError(f"eval.devices names GPU {name}, but this machine has {_shown(listed)}; name one of those")
        if _id_of(name, listed) in used:
            raise UserError(
                f"eval.devices names GPU {name}, which one of the {num_ranks} ranks uses; name a free one, or start "
                "fewer ranks"
            )


def _id_of(name: str, listed: Sequence[str]) -> str:
    """The id of a GPU that is named by number, or by the beginning of its id, as CUDA allows."""
    if name.isdecimal():
        return listed[int(name)] if int(name) < len(listed) else name
    found = [full for full in listed if full.startswith(name)]
    return found[0] if len(found) == 1 else name


def _shown(listed: Sequence[str]) -> str:
    return "GPU 0 alone" if len(listed) == 1 else f"GPUs 0 to {len(listed) - 1}"
