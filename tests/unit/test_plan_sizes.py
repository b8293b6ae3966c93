"""What the planner counts: parameters, tensors that autograd keeps, shards, and the effect of each switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from verl_ext.plan import memory
from verl_ext.plan.memory import StepMemory, UpdatePhases
from verl_ext.plan.model_shape import BUILT_IN, ModelShape, ParameterGroup, shape_of
from verl_ext.plan.workload import RankWorkload

DIMENSIONS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
}


def small_shape(tied: bool = False) -> ModelShape:
    return shape_of(Qwen2Config(**DIMENSIONS, tie_word_embeddings=tied))


def built_in(name: str) -> ModelShape:
    return shape_of(AutoConfig.for_model(**BUILT_IN[name]))


def work(**settings: Any) -> RankWorkload:
    plain = RankWorkload(
        is_grpo=False,
        samples=8,
        tokens_per_sample=32,
        rows=2,
        row_tokens=32,
        num_micro_batches=1,
        num_updates=1,
        logit_tokens=64,
        loss_tokens=64,
        attention="causal",
        forward_passes=0,
        master_bytes=4,
        compute_bytes=4,
        reduce_bytes=4,
        engine_bytes=0,
        checkpointing=False,
        compiled=False,
        fused_loss=False,
        keeps_gathered=False,
        optimizer_implementation="foreach",
    )
    return replace(plain, **settings)


BF16 = {"compute_bytes": 2, "reduce_bytes": 4}


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("data/smollm2_135m", 134_515_008),
    ],
)
def test_parameter_counts_match_known_models(name: str, numel: int) -> None:
    assert built_in(name).numel == numel


def test_parameter_groups_match_verl_wrapping() -> None:
    apart, tied = small_shape(), small_shape(tied=True)
    assert apart.embedding.numel == 128 * 64 and apart.root.numel == 128 * 64 + 64
    assert tied.embedding.numel == 0 and tied.root.numel == apart.root.numel
    assert apart.groups == [apart.root, apart.embedding, apart.layer, apart.layer]


def test_shards_are_rounded_up_by_rows() -> None:
    assert ParameterGroup(((5, 3), (4,))).shard_numel(4) == 2 * 3 + 1
    assert ParameterGroup(((5, 3), (4,))).shard_numel(1) == 19


@pytest.mark.parametrize(("is_padded", "compiled"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen2Config, LlamaConfig, Qwen3Config])
def test_layer_activations_match_autograd(kind: Any, dtype: torch.dtype, is_padded: bool, compiled: bool) -> None:
    """With torch.compile, those of its partition into forward and backward, which needs no C++ compiler."""
    config = kind(**DIMENSIONS, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    hidden = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True) * 1
    positions = torch.arange(32).expand(2, 32)
    rotary = model.model.rotary_emb(hidden, positions)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).tril() if is_padded else None
    not_counted = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *rotary)}
    not_counted |= {mask.untyped_storage().data_ptr()} if is_padded else set()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer = model.model.layers[0]
    if compiled:
        torch.compiler.reset()  # after several compilations of one function, torch runs it eagerly
        layer = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    assert torch.is_tensor(result) or result
    measured = sum(size for pointer, size in kept.items() if pointer not in not_counted)
    settings = BF16 if dtype == torch.bfloat16 else {}
    workload = work(attention="masked" if is_padded else "causal", compiled=compiled, **settings)
    assert memory.layer_bytes(shape_of(config), workload) == pytest.approx(measured, rel=0.01)


def test_sharded_state_is_twenty_bytes_per_parameter() -> None:
    shape = built_in("Qwen/Qwen2.5-Coder-7B-Instruct")
    at_update = UpdatePhases(shape, work(**BF16), 8, is_gpu=True).all()["optimizer"]
    state = at_update["weights"] + at_update["gradients"] + at_update["optimizer"]
    # ZeRO's 16 bytes are for bf16 weights and gradients beside fp32 ones; here all is fp32, with AdamW's temporary
    assert state == pytest.approx((4 + 4 + 8 + 4) * shape.numel / 8)


def test_optimizer_implementation_adds_temporary_memory() -> None:
    shape = built_in("Qwen/Qwen2.5-Coder-7B-Instruct")
    held = {}
    for implementation in ("foreach", "for-loop", "fused"):
        settings = work(**BF16, optimizer_implementation=implementation)
        held[implementation] = UpdatePhases(shape, settings, 8, is_gpu=True).all()["optimizer"]["optimizer"]
    assert held["fused"] == 8 * shape.numel / 8
    assert held["foreach"] - held["fused"] == 4 * shape.numel / 8
    assert held["for-loop"] - held["fused"] == 2 * 4 * shape.vocab * shape.hidden / 8


def test_peak_memory_falls_with_number_of_ranks() -> None:
    shape = built_in("Qwen/Qwen2.5-1.5B-Instruct")
    sizes = [peak(shape, ranks, **BF16) for ranks in (2, 8, 64, 512)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def peak(shape: ModelShape | None = None, ranks: int = 2, **settings: Any) -> float:
    return StepMemory(UpdatePhases(shape or small_shape(), work(**settings), ranks, True).all()).peak_bytes


def test_micro_batch_size_raises_and_checkpointing_lowers_memory() -> None:
    many = {"rows": 64, "logit_tokens": 2048, "loss_tokens": 2048}
    assert peak(**many) > peak()
    assert peak(**many, checkpointing=True) < peak(**many)


def test_fused_loss_holds_logits_of_one_chunk() -> None:
    shape = built_in("Qwen/Qwen2.5-1.5B-Instruct")
    whole = work(logit_tokens=8192, loss_tokens=8192, **BF16)
    fused = replace(whole, fused_loss=True)
    assert memory.loss_forward_bytes(shape, whole, on_gpu=True) == 12 * 8192 * 151936
    assert memory.loss_forward_bytes(shape, fused, on_gpu=False) == (4 + 2) * 128 * 151936
    assert memory.loss_forward_bytes(shape, fused, on_gpu=True) == (4 + 2) * 1766 * 151936
    phases = UpdatePhases(shape, fused, 2, True).all()
    plain = UpdatePhases(shape, whole, 2, True).all()
    output = 151936 * 1536
    more = phases["loss, forward"]["gradients"] - plain["loss, forward"]["gradients"]
    assert more == 4 * output + 2 * output  # added up in fp32, and a chunk's part in bf16


def test_gathered_weights_and_gradients_are_held_in_full() -> None:
    shape = small_shape()
    phases = UpdatePhases(shape, work(keeps_gathered=True, num_micro_batches=2), 2, True).all()
    assert phases["loss, forward"]["communication"] == phases["loss, forward"]["gradients"] == 4 * shape.numel
    sharded = UpdatePhases(shape, work(num_micro_batches=2), 2, True).all()
    assert sharded["loss, forward"]["communication"] == 0
    assert sharded["loss, forward"]["gradients"] == 4 * shape.shard_numel(2)
    assert phases["optimizer"] == sharded["optimizer"]
