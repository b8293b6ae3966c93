"""A digest of what makes a run the run it is, to see whether two configurations are the same."""

from __future__ import annotations

import hashlib

from omegaconf import DictConfig, OmegaConf

NOT_IDENTITY = (
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device", "trainer.log_every", "data.num_workers",
    "trainer.preemption", "trainer.checkpoint.async_save", "trainer.checkpoint.verify", "eval", "health",
)  # fmt: skip
"""Where, on how many processes and how watched a run happens does not change what it is."""


def config_digest(config: DictConfig) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the configuration without the keys of `NOT_IDENTITY`."""
    copy = OmegaConf.create(OmegaConf.to_container(config))
    for key in NOT_IDENTITY:
        OmegaConf.update(copy, key, None)
    return hashlib.sha256(OmegaConf.to_yaml(copy, sort_keys=True).encode()).hexdigest()[:16]
