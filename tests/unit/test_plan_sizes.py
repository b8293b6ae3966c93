"""What the planner counts: parameters, tensors that autograd keeps, shards, and the effect of each switch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2Model

from verl_ext.errors import UserError
from verl_ext.grpo.config import RolloutConfig
from verl_ext.plan import memory
from verl_ext.plan.memory import StepMemory, UpdatePhases, rollout_phase
from verl_ext.plan.model_shape import BUILT_IN, ModelShape, ParameterGroup, empty_model, shape_of
from verl_ext.plan.step_time import HARDWARE, Cluster, step_time
from verl_ext.plan.workload import RankWorkload
from verl_ext.trainer.config import ModelConfig
from verl_ext.trainer.model import add_lora
from verl_ext.trainer.stages import GRPOConfig, SFTConfig

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
        num_epochs=1,
        logit_tokens=64,
        loss_tokens=64,
        attention="causal",
        forward_passes=0,
        master_bytes=4,
        compute_bytes=4,
        reduce_bytes=4,
        engine_bytes=0,
        cache_bytes=0,
        checkpointing=False,
        compiled=False,
        fused_loss=False,
        keeps_gathered=False,
        optimizer_implementation="foreach",
        num_moments=2,
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


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0},  # one matrix for queries, keys and values
    "gemma3_text": {},  # four norms in a layer
    "starcoder2": {},  # LayerNorm, no gate
    "mistral": {"sliding_window": 16},  # shorter than a row
}
ADAPTED: list[str | list[str]] = ["all-linear", ["q_proj", "v_proj"], ["down_proj"]]


def bytes_of_autograd(model: PreTrainedModel, run: Callable[[], Any], without: Iterable[torch.Tensor] = ()) -> int:
    """The memory that autograd saves in a forward pass, besides parameters and other tensors."""
    not_counted = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *without)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert torch.is_tensor(result)
    return sum(size for pointer, size in kept.items() if pointer not in not_counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_match_autograd(family: str, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(family, **DIMENSIONS, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    hidden = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True)
    positions = torch.arange(32).expand(2, 32)
    measured = bytes_of_autograd(
        model, lambda: model.model(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    )
    of_output_projection = hidden.nbytes
    workload = work(**(BF16 if dtype == torch.bfloat16 else {}))
    count = shape_of(config).activations.count(workload)
    assert 2 * count.layer + count.others == pytest.approx(measured + of_output_projection, rel=0.01)


@pytest.mark.parametrize(
    ("family", "is_padded", "compiled", "adapted"),
    [
        *(("llama", is_padded, False, adapted) for is_padded in (False, True) for adapted in (None, *ADAPTED)),
        ("llama", False, True, None),
        ("llama", True, True, "all-linear"),
        ("gemma3_text", False, True, None),
    ],
)
def test_layer_activations_match_autograd(
    family: str, is_padded: bool, compiled: bool, adapted: str | list[str] | None
) -> None:
    """With torch.compile, those of its partition into forward and backward, which needs no C++ compiler."""
    config = AutoConfig.for_model(family, **DIMENSIONS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    settings = ModelConfig(lora_rank=8 if adapted else 0, target_modules=adapted or "all-linear")
    settings.fsdp_config.model_dtype = "bfloat16"
    add_lora(model, settings)
    hidden = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True) * 1
    positions, kind = torch.arange(32).expand(2, 32), getattr(config, "layer_types", [None])[0]
    rotary = model.model.rotary_emb(hidden, positions, *([kind] if kind else []))
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).tril() if is_padded else None
    layer = model.model.layers[0]
    if compiled:
        torch.compiler.reset()  # after several compilations of one function, torch runs it eagerly
        layer = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=True)
    measured = bytes_of_autograd(
        model,
        lambda: layer(hidden, attention_mask=mask, position_embeddings=rotary),
        without=rotary if mask is None else (*rotary, mask),
    )
    shape = shape_of(config, empty_model(config, settings))
    workload = work(attention="masked" if is_padded else "causal", compiled=compiled, **BF16)
    assert shape.activations.count(workload).layer == pytest.approx(measured, rel=0.01)


def test_backward_pass_of_layer_holds_two_gradients_of_its_intermediate_width() -> None:
    found = small_shape().activations.count(work(rows=8, **BF16)).layer_backward
    tokens, hidden, intermediate = 8 * 32, 64, 160
    assert found == 2 * (tokens * (2 * intermediate + hidden) + hidden * intermediate)  # and one weight's gradient


def test_compiled_activations_are_linear_in_tokens() -> None:
    shape = small_shape()
    [small, large] = [shape.activations.count(work(rows=rows, compiled=True, **BF16)) for rows in (1, 16)]
    assert large.layer == 16 * small.layer < shape.activations.count(work(rows=16, **BF16)).layer


def test_model_that_needs_data_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = small_shape()

    def forward(self: Qwen2Model, inputs_embeds: torch.Tensor, **_: Any) -> float:
        return float(inputs_embeds.sum())

    monkeypatch.setattr(Qwen2Model, "forward", forward)
    with pytest.raises(UserError, match="the planner cannot run qwen2 without data .*; see docs/guides/planning"):
        shape.activations.count(work())


def lora_shape(**settings: Any) -> ModelShape:
    config = Qwen2Config(**DIMENSIONS, tie_word_embeddings=False)
    return shape_of(config, empty_model(config, ModelConfig(lora_rank=8, **settings)))


def test_adapters_alone_have_gradients_and_moments() -> None:
    shape, full = lora_shape(), small_shape()
    adapters = 8 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 160))  # of a layer: q and o, k and v, SwiGLU
    assert shape.numel - full.numel == shape.trained.numel == 2 * adapters
    assert (shape.trained.root.numel, shape.trained.embedding.numel) == (0, 0)
    phases = UpdatePhases(shape, work(**BF16, optimizer_implementation="fused"), 1, is_gpu=True).all()
    assert phases["optimizer"]["weights"] == 4 * shape.numel
    assert (phases["optimizer"]["gradients"], phases["optimizer"]["optimizer"]) == (8 * adapters, 16 * adapters)
    assert phases["output projection, backward"]["gradients"] == phases["last layer, backward"]["gradients"] == 0
    fused = UpdatePhases(shape, work(**BF16, fused_loss=True), 1, is_gpu=True).all()
    assert fused["loss, forward"]["gradients"] == 0


def test_backward_pass_skips_gradients_of_frozen_weights() -> None:
    shape, full, cluster = lora_shape(), small_shape(), Cluster(HARDWARE["h100"], 1, 1)
    times = [step_time(SFTConfig(), each, work(**BF16), cluster) for each in (shape, full)]
    dense = 2 * 8 * 32 * full.matmul_numel  # of a forward pass over 8 samples of 32 tokens
    adapters = 2 * 8 * 32 * shape.trained.numel
    attention = 4 * 2 * 64 * 8 * 32 * 16
    assert times[0].model_flops == 2 * dense + 3 * (adapters + attention)
    assert times[1].model_flops == 3 * (dense + attention)
    assert times[0].parts["optimizer"] < times[1].parts["optimizer"]


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["embed_tokens", "v_proj"]}]
)
def test_adapters_outside_decoder_layers_have_no_plan(settings: dict[str, Any]) -> None:
    with pytest.raises(
        UserError,
        match="supports only plain LoRA adapters on linear layers of decoder layers, .*; see docs/guides/plan",
    ):
        lora_shape(**settings)


def test_adapters_with_dropout_have_no_plan(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**DIMENSIONS))
    for dropout in (0.1, 0.0):
        adapters = LoraConfig(r=4, lora_dropout=dropout, target_modules=["v_proj"], task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(model), adapters).save_pretrained(tmp_path / str(dropout))
    assert lora_shape(lora_adapter_path=str(tmp_path / "0.0")).uses_lora
    with pytest.raises(UserError, match="without dropout"):
        lora_shape(lora_adapter_path=str(tmp_path / "0.1"))


def test_adapters_of_some_layers_have_no_plan() -> None:
    with pytest.raises(UserError, match="does not support LoRA adapters that differ between layers; see"):
        lora_shape(target_modules=r".*layers\.1\..*_proj")


def test_adapters_of_whole_parameters_have_no_plan(tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, target_modules=[], target_parameters=["self_attn.q_proj.weight"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_config(Qwen2Config(**DIMENSIONS))
    get_peft_model(model, adapters).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="supports only plain LoRA adapters"):
        lora_shape(lora_adapter_path=str(tmp_path))


def test_adapters_of_another_model_are_rejected(tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_config(Qwen2Config(**{**DIMENSIONS, "hidden_size": 32}))
    get_peft_model(other, LoraConfig(r=4, target_modules=["v_proj"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the LoRA adapters cannot be created"):
        lora_shape(lora_adapter_path=str(tmp_path))


def test_sharded_state_is_twenty_bytes_per_parameter() -> None:
    shape = built_in("Qwen/Qwen2.5-Coder-7B-Instruct")
    at_update = UpdatePhases(shape, work(**BF16), 8, is_gpu=True).all()["optimizer"]
    state = at_update["weights"] + at_update["gradients"] + at_update["optimizer"]
    # ZeRO's 16 bytes are for bf16 weights and gradients and fp32 copies; here all is fp32, with AdamW's temporary
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


@pytest.mark.parametrize(
    ("setting", "is_gpu", "expected"), [(8, True, 8 << 20), (8, False, 4 << 20), (2, False, 2 << 20), (512, True, None)]
)
def test_weight_sync_holds_bucket_of_training_but_at_most_model(
    setting: int, is_gpu: bool, expected: int | None
) -> None:
    shape = shape_of(Qwen2Config(**{**DIMENSIONS, "num_hidden_layers": 64}))
    config = GRPOConfig(rollout=RolloutConfig(update_weights_bucket_megabytes=setting))
    bucket = rollout_phase(config, shape, work(engine_bytes=4), 2, {}, is_gpu)["communication"] / 1.5
    assert bucket == (expected or 4 * shape.numel)
