"""How a run saves, as its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.checkpoint.retention import Retention


@dataclass(frozen=True)
class SaveOptions:
    """Settings of `CheckpointManager`.

    Attributes:
        export_dtype: number type of `huggingface/`.
        export_every: steps between two exports; None exports at every save.
        last_step: always exported.
        max_shard_gib: largest size of one safetensors file, GiB.
        in_background: whether training goes on while a checkpoint is written.
        retention: what stays on the disk.
        config_digest: goes into the manifest.
        seed: `trainer.seed`.
        timeout: how long one rank may take longer than another to write.
        optimizer: goes into the manifest; see `optimizer_name`.
    """

    export_dtype: torch.dtype
    export_every: int | None
    last_step: int
    max_shard_gib: float
    in_background: bool
    retention: Retention
    config_digest: str
    seed: int
    timeout: timedelta
    optimizer: str = ""

    @staticmethod
    def of(
        trainer: Any,
        precision: torch.dtype,
        last_step: int,
        config_digest: str,
        timeout: timedelta,
        optimizer: str = "",
    ) -> SaveOptions:
        """From the `trainer` section of a configuration, and what the forward pass computes in."""
        checkpoint = trainer.checkpoint
        of_export = checkpoint.export.dtype
        return SaveOptions(
            export_dtype=precision if of_export == "auto" else PrecisionType.to_dtype(of_export),
            export_every=checkpoint.export.every,
            last_step=last_step,
            max_shard_gib=checkpoint.export.max_shard_gib,
            in_background=checkpoint.async_save,
            retention=Retention.of(trainer),
            config_digest=config_digest,
            seed=trainer.seed,
            timeout=timeout,
            optimizer=optimizer,
        )

    def exports_at(self, step: int) -> bool:
        """Whether the save of this step has an export."""
        return self.export_every is None or step % self.export_every == 0 or step == self.last_step
