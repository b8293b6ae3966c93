"""Random numbers that belong to a request, whoever answers it and beside whatever else."""

from __future__ import annotations

import hashlib

from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines.answer import Request


def seed_of(request: Request, sampling: SamplingConfig) -> int | None:
    """The seed of one sampled answer; None where the answer is greedy and needs none.

    Returns:
        A number of 31 bits, which every server takes.
    """
    if sampling.temperature == 0:
        return None
    name = f"{sampling.seed}/{request.sample}/{request.problem_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1
