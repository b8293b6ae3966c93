"""verl's checkpoint manager with a commit, saving in the background, and loading on any number of ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.checkpoint.background import Background
from verl_ext.checkpoint.export import create_files
from verl_ext.checkpoint.exporter import Export, Exporter
from verl_ext.checkpoint.layout import EXPORT, Manifest
from verl_ext.checkpoint.load import load_model, load_optimizer, seed_anew
from verl_ext.checkpoint.options import SaveOptions
from verl_ext.checkpoint.rotation import remove_leftovers
from verl_ext.checkpoint.save import Save, discard, temporary_of
from verl_ext.checkpoint.shards import EXTRA, MODEL, OPTIMIZER, ShardFiles
from verl_ext.checkpoint.space import bytes_of, require_space
from verl_ext.checkpoint.staging import Stager
from verl_ext.checkpoint.stock import DATA_STATE, FSDP_CONFIG
from verl_ext.checkpoint.writing import save_errors
from verl_ext.distributed import gather_results, on_every_rank, on_rank_zero
from verl_ext.errors import UserError
from verl_ext.processes import quiet_stdout

EXPECTED_BYTES_PER_S = 0.5e9
"""Of all ranks together, before a save was measured; a modest disk."""


class CheckpointManager(FSDPCheckpointManager):
    """Saves into `global_step_N.tmp`, then lists, renames and rotates; loads what any number of ranks wrote.

    Args:
        options: how this run saves.
        stream: which random numbers this rank draws; ranks that share a sequence share it.
        warn: receives one sentence for what went wrong without stopping the run.
        kwargs: as in verl's manager.
    """

    def __init__(self, *, options: SaveOptions, stream: int, warn: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.options, self.stream, self.warn = options, stream, warn
        self.data_state: dict[str, Any] = {}
        self.step_metrics: dict[str, float] = {}
        exports_weights = "hf_model" in self.checkpoint_save_contents
        self._exporter = Exporter(self.model, self.processing_class, options, exports_weights, self.rank == 0)
        self._stager = Stager()
        # Of its own, so that saving in the background and training never wait for each other's collectives.
        with quiet_stdout():
            self._group = dist.new_group(backend="gloo", timeout=options.timeout)
        self._background: Background[float] | None = None

    # Saving

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write one checkpoint, or begin to, and remove those that it makes superfluous; collective.

        Args:
            local_path: the final directory, `.../global_step_N`.
            hdfs_path: unused, as in verl.
            global_step: N.
            max_ckpt_to_keep: newest checkpoints to keep; None leaves it to the options.

        Raises:
            UserError: it could not be written, now or, when saving in the background, the one before.
        """
        self.wait()
        retention = self.options.retention
        if max_ckpt_to_keep is not None:
            retention = replace(retention, max_to_keep=max_ckpt_to_keep)
        state = self._state()
        export = self._exporter.at(global_step, state[MODEL])
        final = Path(local_path)
        self._make_room(final, bytes_of(state), export, global_step)
        save = Save(
            final=final,
            rank=self.rank,
            manifest=Manifest(
                global_step,
                self.world_size,
                self.options.config_digest,
                {},
                dict(self.step_metrics),
                time=time.time(),
                optimizer=self.options.optimizer if self.should_save_optimizer else "",
                export_dtype=PrecisionType.to_str(self.options.export_dtype),
            ),
            state=self._stager.stage(state) if self.options.in_background else state,
            export=export,
            shared_files=self._shared_files(export) if self.rank == 0 else {},
            retention=retention,
            group=self._group,
            warn=self.warn,
        )
        written = None if self.options.in_background else save.write()
        # Deleting takes as long as a good part of writing, and nothing waits for it.
        self._background = Background(lambda: save.finish(written))

    @property
    def is_writing(self) -> bool:
        """Whether a save, or the rotation after it, has not ended yet on this rank."""
        return self._background is not None and not self._background.is_done

    def wait(self) -> float | None:
        """Wait for the last save to be on the disk and for the rotation after it.

        Returns:
            Seconds that its writing took; None when there was none since the last call.

        Raises:
            UserError: it failed; the same on every rank.
        """
        background, self._background = self._background, None
        return None if background is None else background.result()

    def expected_save_s(self) -> float:
        """A guess at how long the first save takes, in seconds: AdamW's two moments, an export of half the size."""
        own_bytes = bytes_of(self.model.state_dict())
        return 3.5 * own_bytes * self.world_size / EXPECTED_BYTES_PER_S

    def _state(self) -> dict[str, Any]:
        """What this rank saves, by kind of shard; the tensors are those that train on."""
        state: dict[str, Any] = {}
        if self.should_save_model:
            state[MODEL] = self.model.state_dict()
        if self.should_save_optimizer:
            state[OPTIMIZER] = self.optimizer.state_dict()
        if self.should_save_extra:
            state[EXTRA] = {"lr_scheduler": self.lr_scheduler.state_dict(), "rng": self.get_rng_state()}
        return state

    def _make_room(self, final: Path, own_bytes: int, export: Export | None, step: int) -> None:
        """Remove what an interrupted save left, see that the disk has room, and make the directory; collective."""
        shards = sum(gather_results(lambda: own_bytes, self._group))
        total = shards + (export.layout.num_bytes if export else 0)

        def prepare() -> None:
            remove_leftovers(final.parent, self.warn)
            try:
                with save_errors(temporary_of(final)):
                    final.parent.mkdir(parents=True, exist_ok=True)
                    require_space(final.parent, total, step)
                    (temporary_of(final) / EXPORT).mkdir(parents=True)
                if export is not None:
                    create_files(temporary_of(final) / EXPORT, export.layout)
            except UserError:
                discard(temporary_of(final), self.warn)
                raise

        on_rank_zero(prepare, self._group)

    def _shared_files(self, export: Export | None) -> dict[str, Any]:
        """Content by relative path of what a checkpoint has once."""
        return {
            **self._exporter.small_files(export),
            FSDP_CONFIG: json.dumps({"FSDP_version": 2, "world_size": self.world_size}).encode(),
            DATA_STATE: dict(self.data_state),
        }

    # Loading

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint that any number of ranks wrote; collective.

        Args:
            local_path: a complete `global_step_N`.
            hdfs_path: unused, as in verl.
            del_local_after_load: unused: nothing is copied before it is loaded.

        Raises:
            UserError: it does not fit this run.
        """
        on_every_rank(lambda: self._load(Path(local_path)))

    def _load(self, checkpoint: Path) -> None:
        """This rank's part of it, which it reads without the others."""
        if self.should_load_model:
            load_model(self.model, checkpoint)
        if self.should_load_optimizer:
            load_optimizer(self.model, self.optimizer, checkpoint)
        if self.should_load_extra:
            self._load_extra(checkpoint)

    def _load_extra(self, checkpoint: Path) -> None:
        """The schedule, and the random states if ranks and device are the same; otherwise `seed_anew` seeds them."""
        files = ShardFiles(checkpoint, EXTRA)
        same_ranks = files.world_size == self.world_size
        extra = files.content(self.rank if same_ranks else 0)
        self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        if not self.should_load_optimizer:  # a new one, which has the rate of the first step
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr()):
                group["lr"] = rate
        if same_ranks and get_device_name() in extra["rng"]:  # one of a GPU has that of the CPU too
            self.load_rng_state(extra["rng"])
        else:
            seed_anew(self.options.seed, Manifest.read(checkpoint).step, self.stream)

    def load_data_state(self, local_path: str) -> dict[str, Any]:
        """The position in the data that was saved with a checkpoint; nothing where verl had no time to write it."""
        path = Path(local_path) / DATA_STATE
        return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
