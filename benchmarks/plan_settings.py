"""What `benchmarks.plan` compares: models and configurations by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TARGET = 0.15
"""Of a prediction, the largest relative error that is wanted."""
PLAIN = ("data.packing=false", "model.fused_loss=false", "model.fsdp_config.keep_gathered=false")
"""What a setting does not do unless it says so."""


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        ranks: processes.
        length: tokens of a sample.
        rows: samples of a rank's micro-batch, and `micro_batches` of them in its step.
        model: dimensions of a Qwen2 model.
        short_length: tokens of every other sample, where there are such; they are padded.
        overrides: of the configuration.
    """

    ranks: int
    length: int
    rows: int
    model: dict[str, Any]
    micro_batches: int = 1
    short_length: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Of a step, and of the data set: every step is the same."""
        return self.ranks * self.rows * self.micro_batches


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, vocab: int, tied: bool = False) -> dict[str, Any]:
    """Dimensions of a model with four heads of keys and values."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


CHECKPOINTING = ("model.enable_gradient_checkpointing=true",)
WIDE = qwen2(768, 2048, 8, 12, 32000)
SETTINGS = {
    "two ranks": Setting(2, 512, 4, WIDE),
    "two ranks, checkpointing": Setting(2, 512, 4, WIDE, overrides=CHECKPOINTING),
    "one rank, padded rows": Setting(1, 512, 4, WIDE, short_length=256),
    "two ranks, bf16": Setting(2, 256, 4, qwen2(768, 2048, 4, 12, 32000), overrides=("model.mixed_precision=bf16",)),
    "two ranks, two micro-batches, weights stay gathered": Setting(
        2, 256, 2, qwen2(1024, 2816, 6, 16, 16000), 2, overrides=("model.fsdp_config.keep_gathered=true",)
    ),
    "two ranks, vocabulary of Qwen2.5": Setting(2, 256, 2, qwen2(512, 1408, 4, 8, 152064)),
    "one rank, tied, checkpointing, two micro-batches": Setting(
        1, 512, 4, qwen2(1024, 2816, 6, 16, 8192, tied=True), micro_batches=2, overrides=CHECKPOINTING
    ),
    "one rank, one long sample": Setting(1, 2048, 1, qwen2(768, 2048, 6, 12, 16000)),
    "one rank, large model, few tokens": Setting(1, 128, 1, qwen2(1280, 3456, 8, 20, 32000)),
    "two ranks, packed, fused loss": Setting(2, 512, 4, WIDE, overrides=("data.packing=true", "model.fused_loss=true")),
    "two ranks, packed, fused, checkpointing, two micro-batches, weights stay gathered": Setting(
        2,
        512,
        4,
        WIDE,
        2,
        overrides=(
            *("data.packing=true", "model.fused_loss=true", "data.max_tokens_per_gpu=2048", *CHECKPOINTING),
            "model.fsdp_config.keep_gathered=true",
        ),
    ),
    "two ranks, small vocabulary": Setting(2, 512, 2, qwen2(1024, 2816, 10, 16, 4096), micro_batches=2),
}
