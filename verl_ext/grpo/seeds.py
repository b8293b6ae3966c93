"""Random numbers that belong to one draw, whatever is drawn beside it and wherever the run was interrupted."""

from __future__ import annotations

import hashlib


def seed_of(run_seed: int, step: int, sample_id: str, number: int) -> int:
    """A number of 31 bits, which every engine takes.

    Args:
        run_seed: `trainer.seed`.
        step: the optimizer step that the draw is for.
        sample_id: of the prompt.
        number: of the sample in its group.
    """
    name = f"{run_seed}/{step}/{number}/{sample_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1
