"""verl's checkpoint manager with a commit: a crash at any moment leaves every earlier checkpoint as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.checkpoint.commit import flush_and_digest, publish, write_manifest
from verl_ext.checkpoint.export import export_model
from verl_ext.checkpoint.layout import EXPORT, Manifest
from verl_ext.checkpoint.rotation import rotate

DATA_STATE = "data.pt"


class CheckpointManager(FSDPCheckpointManager):
    """Saves into `global_step_N.tmp`, then lists, renames and rotates; loads as verl does.

    Args:
        export_dtype: number type of `huggingface/`: bf16, fp16 or fp32.
        config_digest: goes into the manifest.
        warn: receives one sentence for what went wrong without stopping the run.
        kwargs: as in verl's manager.
    """

    def __init__(self, *, export_dtype: str, config_digest: str, warn: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.export_dtype = PrecisionType.to_dtype(export_dtype)
        self.config_digest = config_digest
        self.warn = warn
        self.data_state: dict[str, Any] = {}
        self._exports = "hf_model" in self.checkpoint_save_contents

    @property
    def should_save_hf_model(self) -> bool:
        """Always false for verl's own save, which would write the master weights' type; the export is ours."""
        return False

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write one checkpoint and remove those that it makes superfluous; collective.

        Args:
            local_path: the final directory, `.../global_step_N`.
            hdfs_path: unused, as in verl.
            global_step: N.
            max_ckpt_to_keep: newest checkpoints to keep; None keeps all.
        """
        final = Path(local_path)
        temporary = final.with_name(f"{final.name}.tmp")
        if self.rank == 0:
            rotate(final.parent, None, global_step, self.warn)  # a save that was cut short left its directory
        dist.barrier()
        super().save_checkpoint(str(temporary), global_step=global_step)
        self._write_rest(temporary)
        files = self._digest_files(temporary)
        if self.rank == 0:
            write_manifest(
                temporary, Manifest(global_step, self.world_size, self.config_digest, files, time=time.time())
            )
            publish(temporary, final, global_step)
            rotate(final.parent, max_ckpt_to_keep, global_step, self.warn)
        dist.barrier()

    def load_data_state(self, local_path: str) -> dict[str, Any]:
        """The position in the data that was saved with a checkpoint."""
        return torch.load(Path(local_path) / DATA_STATE, map_location="cpu", weights_only=True)

    def _write_rest(self, directory: Path) -> None:
        if self._exports:
            export_model(self.model, self.processing_class, directory / EXPORT, self.export_dtype, self.rank == 0)
        if self.rank == 0:
            torch.save(self.data_state, directory / DATA_STATE)

    def _digest_files(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Relative name to size and digest of every file; each rank reads those that it wrote."""
        dist.barrier()
        mine = {}
        for path in sorted(child for child in directory.rglob("*") if child.is_file()):
            if self._writer_of(path) == self.rank:
                mine[str(path.relative_to(directory))] = flush_and_digest(path)
        everyone: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(everyone, mine)
        return {name: entry for files in everyone for name, entry in files.items()}

    def _writer_of(self, path: Path) -> int:
        _, found, number = path.stem.rpartition("_rank_")
        return int(number) if found and path.suffix == ".pt" else 0
