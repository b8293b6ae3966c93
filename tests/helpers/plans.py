"""Settings of the plans that tests compare with calculations by hand."""

from __future__ import annotations

from benchmarks.plan import PLAIN

FIXED = {
    "sft": (*PLAIN, "model.enable_gradient_checkpointing=true", "model.compile=false"),
    "grpo": ("data.train_batch_size=64", "actor.ppo_mini_batch_size=32", "rollout.gpu_memory_utilization=0.5"),
}
"""Overrides of the 7B recipes, by command."""
