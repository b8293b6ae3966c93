"""Configuration of checkpoints. Keys that verl has keep verl's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_ext.config.schema import section, setting
from verl_ext.errors import UserError

Content = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass(kw_only=True)
class ExportConfig:
    """`trainer.checkpoint.export`: the Hugging Face model in a checkpoint."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = setting("bf16", "dtype of huggingface/; auto: the forward pass's")
    every: int | None = setting(
        None,
        "Steps between exports, a multiple of save_freq; also after the last step",
        ge=1,
        null="every save",
    )
    max_shard_gib: float = setting(5.0, "Maximum size of a safetensors file", ge=1e-6)


@dataclass(kw_only=True)
class CheckpointConfig:
    """`trainer.checkpoint`."""

    save_contents: list[Content] = setting(
        ["model", "optimizer", "extra", "hf_model"],
        "model is required; extra: schedule and RNG states; hf_model: huggingface/",
    )
    load_contents: list[Content] = setting(
        "${trainer.checkpoint.save_contents}",
        "Contents to load from the checkpoint at which the run first starts, or that resume_from_path names; other "
        "starts load all",
    )
    async_save: bool = setting(False, "Write in the background; training waits only for a copy")
    export: ExportConfig = section(ExportConfig)
    keep_best: int = setting(1, "Best checkpoints to keep in addition", ge=0)
    best_metric: str = setting("val/loss", "Ranking metric: train/, val/ or eval/")
    best_mode: Literal["min", "max"] = setting("min", "Whether lower or higher is better")
    drop_optimizer_of_best: bool = setting(False, "Delete optimizer shards of checkpoints kept only as best")
    verify: bool = setting(True, "Verify digests before resuming")

    def check(self) -> None:
        """Refuse checkpoints without weights."""
        if "model" not in self.save_contents:
            raise UserError(
                "trainer.checkpoint.save_contents lacks 'model', and a checkpoint without weights cannot be resumed; "
                "add model to the list"
            )
