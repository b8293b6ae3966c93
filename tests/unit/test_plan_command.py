"""The planner's times, rollout engine, advice, and the command with its tables."""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, GPT2Config, Qwen2Config

from benchmarks.gpu_check import COMPILED, LORA, NARROW, GPUCheckSettings
from benchmarks.gpu_speed import SHAPES, config_of
from benchmarks.plan import SETTINGS
from benchmarks.plan_ranks import predicted, sft_config
from tests.helpers import ROOT
from tests.helpers.plans import FIXED
from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.plan import model_shape
from verl_ext.plan.__main__ import main
from verl_ext.plan.memory import kv_token_bytes
from verl_ext.plan.model_shape import BUILT_IN, ModelShape, empty_model, shape_of
from verl_ext.plan.planner import RunPlan, candidate_fixes, largest_that_fits, make_plan, room_for_engine, suggest_fix
from verl_ext.plan.step_time import DISK_GBPS, HARDWARE, Cluster, StepTime
from verl_ext.plan.workload import DataLengths
from verl_ext.trainer.stages import load_config

ALL = DataLengths()
H100 = HARDWARE["h100"]
SHAPE_7B = shape_of(AutoConfig.for_model(**BUILT_IN["Qwen/Qwen2.5-Coder-7B-Instruct"]))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shape, "hub_answers", lambda timeout_s: False)


def plan_7b(*overrides: str, gpus: int = 8, recipe: str = "qwen2.5_coder_7b", command: str = "sft") -> RunPlan:
    config = load_config(command, [f"recipe={recipe}", *FIXED[command], *overrides])
    return make_plan(config, SHAPE_7B, Cluster(H100, gpus, 8), ALL)


def test_collective_time_within_and_between_nodes() -> None:
    exact = replace(H100, link_share=1.0, latency=0.0)
    assert Cluster(exact, 1, 8).collective_s(1e9) == 0
    assert Cluster(exact, 8, 8).collective_s(9e9) == pytest.approx(9e9 * 7 / 8 / 450e9)
    # eight nodes: each sends 7/8 of it through eight adapters of 50 GB/s, which is slower than NVLink
    assert Cluster(exact, 64, 8).collective_s(8e9) == pytest.approx(8e9 * 7 / 8 / 400e9)
    assert Cluster(H100, 64, 8).collective_s(8) > 63 * H100.latency


def test_compute_is_six_flops_per_parameter_eight_checkpointed() -> None:
    plain = plan_7b("model.enable_gradient_checkpointing=false", "data.max_length=1")
    tokens = 128
    expected = 6 * SHAPE_7B.matmul_numel * tokens
    assert plain.time.model_flops == pytest.approx(expected, rel=1e-3)
    seconds = expected / 8 / (H100.flops * H100.compute_share)
    assert plain.time.parts["compute"] == pytest.approx(seconds, rel=1e-3)
    checkpointed = (
        plan_7b().time.parts["compute"] / plan_7b("model.enable_gradient_checkpointing=false").time.parts["compute"]
    )
    assert 1.30 < checkpointed < 1.34


@pytest.mark.parametrize(("name", "ratio"), [("h100", 989 / 67), ("h200", 989 / 67), ("a100", 312 / 19.5), ("cpu", 1)])
def test_fp32_computes_at_its_own_peak(name: str, ratio: float) -> None:
    def plan(*overrides: str, **which: str) -> RunPlan:
        return make_plan(plan_7b(*overrides, **which).config, SHAPE_7B, Cluster(HARDWARE[name], 8, 8), ALL)

    bf16, fp32 = (plan(f"model.mixed_precision={each}").time for each in ("bf16", "fp32"))
    assert fp32.parts["compute"] / bf16.parts["compute"] == pytest.approx(ratio)
    prefill = ("data.max_prompt_length=2047", "data.max_response_length=1", "rollout.n=2")  # bound by compute
    bf16, fp32 = (plan(*prefill, f"rollout.dtype={each}", **GRPO).time for each in ("bfloat16", "float32"))
    assert fp32.parts["generation"] / bf16.parts["generation"] == pytest.approx(ratio, rel=0.1)


def test_epochs_repeat_passes_but_not_old_log_probs() -> None:
    def of_epochs(number: int) -> StepTime:
        return plan_7b(f"actor.ppo_epochs={number}", recipe="qwen2.5_coder_7b_code", command="grpo").time

    one, two, three = (of_epochs(number) for number in (1, 2, 3))
    assert (two.model_flops, three.model_flops) == (2 * one.model_flops, 3 * one.model_flops)
    for part in ("compute", "communication"):
        trained = two.parts[part] - one.parts[part]
        assert three.parts[part] - two.parts[part] == pytest.approx(trained)
        assert 0 < one.parts[part] - trained < trained  # old log-probabilities, whose cost does not change
    once = one.parts["compute"] - (two.parts["compute"] - one.parts["compute"])
    assert once == pytest.approx(one.model_flops / 3 / 8 / (H100.flops * H100.compute_share))


def test_masked_sdpa_and_eager_attention_compute_all_pairs() -> None:
    padded, alone = plan_7b().time.model_flops, plan_7b("data.micro_batch_size_per_gpu=1").time.model_flops
    assert padded - alone == pytest.approx(3 * 4 * 28 * 3584 * 128 * 4096 * 2048)
    packed = plan_7b("data.packing=true").time.model_flops
    assert packed == plan_7b("model.attn_implementation=flash_attention_2").time.model_flops == alone
    eager = ("model.attn_implementation=eager", "data.micro_batch_size_per_gpu=1")
    assert plan_7b(*eager).time.model_flops == padded


def test_communication_overlaps_with_compute_until_it_dominates() -> None:
    assert plan_7b().time.bound_by == "compute"
    small = plan_7b("data.max_length=64", "data.micro_batch_size_per_gpu=1", gpus=64)
    assert small.time.bound_by == "communication" and "the network" in small.bound_by


def test_gathered_weights_save_communication() -> None:
    short = ("data.max_length=64", "data.micro_batch_size_per_gpu=1")
    usual, kept = plan_7b(*short).time, plan_7b(*short, "model.fsdp_config.keep_gathered=true").time
    assert kept.parts["communication"] + kept.hidden_s < (usual.parts["communication"] + usual.hidden_s) / 10


def test_memory_of_7b_grpo_recipe_matches_hand_calculation() -> None:
    plan = plan_7b(recipe="qwen2.5_coder_7b_code", command="grpo")
    rollout = plan.memory.phases["rollout"]
    assert rollout["engine weights"] == 2 * SHAPE_7B.numel
    assert rollout["engine weights"] + rollout["KV cache"] == 0.5 * H100.memory_bytes
    assert plan.memory.peak_bytes / GIB == pytest.approx(48.9, abs=0.3)  # computed by hand
    assert set(plan.time.parts) == {"generation", "weights to the engine", "compute", "communication", "optimizer"}


def test_generation_computes_prompt_of_group_once() -> None:
    def generation_s(num_prompts: int, group_size: int) -> float:
        words = f"data.train_batch_size={num_prompts}", f"rollout.n={group_size}"
        return plan_7b(*words, recipe="qwen2.5_coder_7b_code", command="grpo").time.parts["generation"]

    more_tokens = (128 - 64) / 8 * 2048  # on each GPU, in prompts of maximum length
    seconds = 2 * SHAPE_7B.matmul_numel * more_tokens / (H100.flops * H100.compute_share)
    assert generation_s(128, 4) - generation_s(64, 8) == pytest.approx(seconds)


def test_engine_without_sleep_occupies_memory_in_update() -> None:
    asleep = plan_7b(recipe="qwen2.5_coder_7b_code", command="grpo")
    awake = plan_7b("rollout.free_cache_engine=false", recipe="qwen2.5_coder_7b_code", command="grpo")
    phase = "loss, backward"
    more = sum(awake.memory.phases[phase].values()) - sum(asleep.memory.phases[phase].values())
    assert more == 0.5 * H100.memory_bytes


def test_advice_names_settings_that_fit() -> None:
    plan = plan_7b("data.micro_batch_size_per_gpu=16")
    assert not plan.fits
    assert suggest_fix(plan).startswith("with model.fused_loss=true it takes ")
    assert "8 GPUs" in suggest_fix(plan_7b(gpus=1)) or "2 GPUs" in suggest_fix(plan_7b(gpus=1))
    tiny = make_plan(plan.config, SHAPE_7B, Cluster(replace(H100, memory_bytes=1e9), 8, 8), ALL)
    assert suggest_fix(tiny).startswith("no known setting makes it fit")


@pytest.mark.parametrize(
    ("model_type", "changes"), [("granite", {"logits_scaling": 8.0}), ("gemma2", {}), ("cohere", {})]
)
def test_advice_omits_fused_loss_for_models_that_change_logits(model_type: str, changes: dict[str, float]) -> None:
    model = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 4000, "pad_token_id": 0}
    config = load_config("sft", ["recipe=qwen2.5_coder_7b", "model.fused_loss=false", "model.compile=false"])
    shape = shape_of(AutoConfig.for_model(model_type, **model, **changes))
    plan = make_plan(config, shape, Cluster(replace(H100, memory_bytes=1e8), 8, 8), ALL)
    assert not plan.fits
    assert not any("model.fused_loss" in overrides for overrides, _ in candidate_fixes(plan))


def test_advice_for_grpo_starts_with_engine() -> None:
    awake = ("rollout.free_cache_engine=false", "rollout.gpu_memory_utilization=0.75")
    plan = plan_7b(*awake, recipe="qwen2.5_coder_7b_code", command="grpo")
    assert not plan.fits
    assert suggest_fix(plan).startswith("with rollout.free_cache_engine=true it takes ")
    asleep = {"rollout.free_cache_engine": True}, {"rollout.gpu_memory_utilization": 0.5}
    assert list(candidate_fixes(plan))[:2] == [(each, None) for each in asleep]


GRPO = {"recipe": "qwen2.5_coder_7b_code", "command": "grpo"}


def test_engine_without_room_for_its_weights_does_not_fit() -> None:
    plan = plan_7b("rollout.gpu_memory_utilization=0.15", **GRPO)
    assert plan.memory.peak_bytes < 0.5 * H100.memory_bytes and not plan.fits
    told = suggest_fix(plan)
    assert "vLLM cannot start with rollout.gpu_memory_utilization=0.15" in told
    assert "with rollout.gpu_memory_utilization=0.25 it takes" in told
    assert plan_7b("rollout.gpu_memory_utilization=0.25", **GRPO).fits


def test_engine_needs_room_for_longest_sequence() -> None:
    """15.23 GB of weights and 57,344 bytes per token; 0.2 of the GPU is 16 GB."""
    fits = plan_7b("rollout.gpu_memory_utilization=0.2", "data.max_response_length=10000", **GRPO)
    short = plan_7b("rollout.gpu_memory_utilization=0.2", "data.max_response_length=12000", **GRPO)
    assert not fits.shortage and "one sequence of 14048 tokens" in short.shortage


def test_ranks_that_share_an_engine_share_its_weights() -> None:
    assert plan_7b("rollout.gpu_memory_utilization=0.15", "rollout.tensor_model_parallel_size=2", **GRPO).fits
    large = make_plan(plan_7b(**GRPO).config, SHAPE_7B, Cluster(replace(H100, memory_bytes=16e9), 32, 8), ALL)
    room = {"rollout.tensor_model_parallel_size": 2, "rollout.gpu_memory_utilization": 0.55}
    assert large.shortage and room_for_engine(large) == room
    assert all(settings.keys() >= room.keys() for settings, _ in candidate_fixes(large))


def test_cache_in_fp8_takes_half_the_memory() -> None:
    plain, fp8 = plan_7b(**GRPO), plan_7b("rollout.vllm.kv_cache_dtype=fp8", **GRPO)
    assert kv_token_bytes(fp8.config, SHAPE_7B, fp8.work) == kv_token_bytes(plain.config, SHAPE_7B, plain.work) / 2
    assert fp8.time.parts["generation"] < plain.time.parts["generation"]
    with pytest.raises(UserError, match="kv_cache_dtype=nvfp4; plan with"):
        plan_7b("rollout.vllm.kv_cache_dtype=nvfp4", **GRPO)


def test_options_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=qwen2.5_coder_7b_code", "rollout.vllm.max_num_batched_tokens=4096", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert "the plan ignores rollout.vllm.max_num_batched_tokens" in found["notes"]
    with pytest.raises(SystemExit):
        main(["recipe=qwen2.5_coder_7b_code", "loss_token_fraction=0.5"])
    assert "loss_token_fraction is for sft only" in capsys.readouterr().err


def test_ranks_of_engine_divide_heads() -> None:
    """The model has 28 attention heads and 4 key-value heads."""
    with pytest.raises(
        UserError, match="28 attention heads and 4 key-value heads of qwen2; set it to one of 1, 2, 4, 28"
    ):
        plan_7b("rollout.tensor_model_parallel_size=8", **GRPO)
    assert not SHAPE_7B.splits_heads(14) and SHAPE_7B.splits_heads(28)
    assert SHAPE_7B.kv_numel(4) == SHAPE_7B.kv_numel(28) == SHAPE_7B.kv_numel() / 4
    small = replace(plan_7b(**GRPO).cluster, hardware=replace(H100, memory_bytes=4e9))  # too small for any valid size
    assert room_for_engine(make_plan(plan_7b(**GRPO).config, SHAPE_7B, small, ALL)) == {}


def test_transformers_share_no_engine() -> None:
    one, two = (plan_7b("rollout.engine=hf", f"rollout.tensor_model_parallel_size={each}", **GRPO) for each in (1, 2))
    assert one.time == two.time and one.memory == two.memory


def test_transformers_and_cpus_ignore_memory_utilization() -> None:
    assert plan_7b("rollout.gpu_memory_utilization=0.15", "rollout.engine=hf", **GRPO).fits
    config = plan_7b("rollout.gpu_memory_utilization=0.15", **GRPO).config
    assert not make_plan(config, SHAPE_7B, Cluster(HARDWARE["cpu"], 8, 8), ALL).shortage


def test_advice_for_engine_keeps_its_memory() -> None:
    plan = plan_7b("rollout.gpu_memory_utilization=0.15", "data.micro_batch_size_per_gpu=32", **GRPO)
    told = suggest_fix(plan)
    assert "rollout.gpu_memory_utilization=0.25 and data.micro_batch_size_per_gpu=8 it takes" in told


CHECKPOINTS = json.loads((ROOT / "benchmarks/results/checkpoint_2cpu_disk.json").read_text())
SMALL = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def test_predicted_checkpoint_size_matches_measurement() -> None:
    shape = shape_of(Qwen2Config(**SMALL, num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=False))
    assert shape.numel == CHECKPOINTS["parameters"]
    disk = make_plan(plan_7b().config, shape, Cluster(HARDWARE["cpu"], 2, 2), ALL).disk
    assert disk.checkpoint_bytes / GIB == pytest.approx(CHECKPOINTS["saves"]["sync"]["gib"], rel=1e-3)


def test_disk_usage_follows_save_and_retention_settings() -> None:
    numel, keep = SHAPE_7B.numel, ("trainer.save_freq=100", "trainer.max_ckpt_to_keep=3")
    disk = plan_7b(*keep, "trainer.checkpoint.keep_best=2").disk
    assert disk.parts == {"weights": 4 * numel, "optimizer": 8 * numel, "export": 2 * numel}
    assert disk.max_checkpoints == 6 and disk.total_bytes == 6 * 14 * numel
    stripped = plan_7b(*keep, "trainer.checkpoint.keep_best=2", "trainer.checkpoint.drop_optimizer_of_best=true").disk
    assert stripped.total_bytes == disk.total_bytes - 2 * 8 * numel
    without = plan_7b("trainer.checkpoint.save_contents=[model]", "model.fsdp_config.model_dtype=bf16").disk
    assert without.checkpoint_bytes == 2 * numel
    in_fp32 = plan_7b("trainer.checkpoint.export.dtype=fp32").disk
    assert in_fp32.parts["export"] == 4 * numel


@pytest.mark.parametrize("which", [{}, GRPO])
def test_amsgrad_has_third_moment(which: dict[str, str]) -> None:
    plain, amsgrad = (plan_7b(f"optim.override_optimizer_config={{{each}}}", **which) for each in ("", "amsgrad: true"))
    for phase, parts in plain.memory.phases.items():
        more = amsgrad.memory.phases[phase]["optimizer"] - parts["optimizer"]
        assert more == pytest.approx(4 * SHAPE_7B.shard_numel(8))
    assert amsgrad.disk.parts["optimizer"] == 12 * SHAPE_7B.numel
    assert amsgrad.time.parts["optimizer"] > plain.time.parts["optimizer"]


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        (["trainer.save_freq=-1"], 1),
        (["trainer.save_freq=10", "trainer.max_ckpt_to_keep=null"], None),
        (["trainer.save_freq=10", "trainer.max_ckpt_to_keep=null", "trainer.total_training_steps=35"], 4),
        (["trainer.save_freq=10", "trainer.max_ckpt_to_keep=9", "trainer.total_training_steps=35"], 4),
        (["trainer.save_freq=10", "trainer.max_ckpt_to_keep=1", "trainer.total_training_steps=35"], 3),
        (
            [
                "trainer.save_freq=10",
                "trainer.max_ckpt_to_keep=1",
                "trainer.total_training_steps=99",
                "eval.watch=true",
            ],
            4,
        ),
    ],
)
def test_predicts_maximum_number_of_checkpoints(overrides: list[str], number: int | None) -> None:
    disk = plan_7b(*overrides).disk
    assert disk.max_checkpoints == number and (disk.total_bytes is None) == (number is None)


def test_checkpoints_between_exports_have_none() -> None:
    words = ("trainer.save_freq=10", "trainer.max_ckpt_to_keep=5", "trainer.checkpoint.keep_best=0")
    always, seldom = (plan_7b(*words, f"trainer.checkpoint.export.every={each}").disk for each in ("null", "100"))
    assert always.max_checkpoints == seldom.max_checkpoints == 6 and always.num_without_export == 0
    assert seldom.total_bytes == always.total_bytes - 4 * 2 * SHAPE_7B.numel  # one of a step, and the last step's
    assert seldom.checkpoint_bytes == always.checkpoint_bytes
    ends = (*words, "trainer.checkpoint.export.every=20", "trainer.total_training_steps=40")
    assert plan_7b(*ends).disk.num_without_export == 2  # of four


def test_export_of_lora_is_merged() -> None:
    config = plan_7b("model.lora_rank=8").config
    tiny = Qwen2Config(**{**SMALL, "num_hidden_layers": 2}, num_key_value_heads=4, vocab_size=4000)
    adapted = shape_of(tiny, empty_model(tiny, config.model))
    disk = make_plan(config, adapted, Cluster(H100, 8, 8), ALL).disk
    assert disk.parts["export"] == 2 * shape_of(tiny).numel
    assert disk.parts["weights"] == 4 * adapted.numel > 4 * shape_of(tiny).numel


def test_save_time_follows_disk_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=qwen2.5_coder_7b", "disk_gbps=2.5", "trainer.max_ckpt_to_keep=2", "trainer.save_freq=10"]
    words += ["trainer.checkpoint.async_save=false", "model.compile=false"]  # tracing the compiled model takes seconds
    main([*words, "--json"])
    [found] = json.loads(capsys.readouterr().out)
    assert found["disk_gbps"] == 2.5 and found["max_checkpoints"] == 4
    assert found["save_s"] == pytest.approx(14 * SHAPE_7B.numel / 2.5e9)
    assert found["all_checkpoints_bytes"] == 4 * found["checkpoint_bytes"] == 4 * sum(found["disk_bytes"].values())
    main(words)
    text = capsys.readouterr().out
    assert "99.30   42.6 s to write at disk_gbps=2.5, while training waits" in text
    assert "397.19   at most 4, including the one being written" in text
    main([*words, "--markdown"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 99.3 | 397.2 | 42.6 |")
    main([*words, "trainer.checkpoint.async_save=true", "trainer.max_ckpt_to_keep=null"])
    text = capsys.readouterr().out
    assert "in the background" in text and "keeps all checkpoints: one more every 10 steps" in text


def test_default_disk_bandwidth_is_ten_gigabits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe=qwen2.5_coder_7b", "model.compile=false", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["disk_gbps"] == DISK_GBPS == 1.0


def test_largest_micro_batch_fits_and_twice_that_does_not() -> None:
    best = largest_that_fits(plan_7b("data.train_batch_size=1024"))
    size = best.config.data.micro_batch_size_per_gpu
    assert best.fits and not plan_7b("data.train_batch_size=1024", f"data.micro_batch_size_per_gpu={2 * size}").fits


def test_command_output_and_exit_code_say_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=qwen2.5_coder_7b", "model.compile=false"]
    assert main([*words, "gpus=8"]) == 0
    told = capsys.readouterr().out
    assert "7,615,616,512 parameters" in told and "using built-in dimensions" in told and "It fits." in told
    assert "\nMemory of a rank at its peak (" in told  # on CPUs, there is no GPU
    assert main([*words, "gpus=1", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert not found["fits"] and "GPUs" in found["advice"]
    assert sum(found["memory_bytes"][found["peak"]].values()) == pytest.approx(found["peak_bytes"])


@pytest.mark.parametrize(("command", "recipe"), [("sft", "qwen2.5_coder_7b"), ("grpo", "qwen2.5_coder_7b_code")])
def test_7b_recipes_fit_on_eight_gpus(command: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The grace period has room for a step, a save that is in progress, and one without its export."""
    assert main([f"recipe={recipe}", "gpus=8", "hardware=h100", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["fits"] and 0.7 < found["peak_bytes"] / H100.memory_bytes < 0.95
    trainer = load_config(command, [f"recipe={recipe}"]).trainer
    assert trainer.checkpoint.async_save
    state_share = 1 - found["disk_bytes"]["export"] / found["checkpoint_bytes"]
    assert found["step_s"] + (1 + state_share) * found["save_s"] < trainer.preemption.grace_s


def test_command_reports_engine_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=qwen2.5_coder_7b_code", "gpus=8", "rollout.gpu_memory_utilization=0.15"]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "It fits." not in told and "It does not fit: vLLM cannot start" in told
    assert main([*words, "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert not found["fits"] and "vLLM cannot start" in found["advice"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=nowhere"], "error: there is no recipe 'nowhere'"),
        (
            ["hardware=h1000"],
            "error: the command line sets 'hardware' to 'h1000', but it must be h100, h200, a100 or cpu",
        ),
        (
            ["gpus=3", "recipe=qwen2.5_coder_7b"],
            "error: data.train_batch_size=128 must be a multiple of the number of data-parallel ranks, 3; set",
        ),
        (
            ["gpus=1e99"],
            "error: the command line sets 'gpus' to [1e+99], but it must be a list [a, b] of integers from 1 to",
        ),
        (["data.train_batch_size=0"], "error: data.train_batch_size is 0; it must be an integer of at least 1"),
        (["data.max_length=0"], "error: data.max_length is 0; it must be an integer of at least 1"),
    ],
)
def test_rejects_bad_input_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(says) and error.count("\n") == 1


def test_rejects_unsupported_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["recipe=quickstart", "gpus=2", f"model.partial_pretrain={tmp_path}"])
    assert left.value.code == 2 and "the planner does not support gpt2, only" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(SystemExit) as left:
        main(["recipe=quickstart", "gpus=2", f"model.partial_pretrain={tmp_path}"])
    assert left.value.code == 2 and "config.json is not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"model_type": "ctrl", "n_layer": 1, "n_embd": 8, "n_head": 1}, "does not support ctrl"),
        (
            {"model_type": "llama", "num_hidden_layers": 0, "hidden_size": 8, "num_attention_heads": 2},
            "does not support llama",
        ),
        ({"model_type": "llama", "hidden_size": "a"}, "cannot be read (Field 'hidden_size' expected int"),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3},
            "cannot be read (The hidden size (100)",
        ),
    ],
)
def test_rejects_model_that_it_cannot_plan(
    model: dict[str, str | int], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(SystemExit) as left:
        main(["recipe=quickstart", "gpus=2", f"model.partial_pretrain={tmp_path}"])
    error = capsys.readouterr().err
    assert left.value.code == 2 and says in error and error.count("\n") == 1


@pytest.mark.parametrize("space", ["abc", "0.5"])
def test_rejects_cache_size_that_vllm_cannot_read(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    with pytest.raises(UserError, match=f"VLLM_CPU_KVCACHE_SPACE is '{space}'; set it to a whole number of GiB"):
        make_plan(plan_7b(**GRPO).config, SHAPE_7B, Cluster(HARDWARE["cpu"], 8, 8), ALL)


PAGE = (ROOT / "docs/guides/planning.md").read_text()
EXAMPLES = re.findall(
    r"```bash\n\.venv/bin/python -m verl_ext\.plan ([^`]*)\n```\n\n(?:```\n([^`]*)```\n|((?:\|.*\n)+))", PAGE
)


def test_docs_page_has_expected_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("-m verl_ext.plan ") and {bool(table) for *_, table in EXAMPLES} == {True, False}


@pytest.mark.parametrize(("words", "text", "table"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_documented_outputs_match_commands(
    words: str, text: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(words.replace("\\\n", " ")))
    printed = capsys.readouterr().out
    if table:
        assert printed.strip() == table.strip()
    lines = iter(printed.splitlines())
    assert [line for line in text.splitlines() if line != "..." and line not in lines] == []  # in order


RESULTS = json.loads((ROOT / "benchmarks/results/plan_2cpu.json").read_text())


def test_documented_measurements_match_record() -> None:
    page = (ROOT / "docs/design/memory_model.md").read_text()
    [table] = re.findall(r"^\| setting \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows == [
        [
            name,
            f"{found['predicted_gib']:.2f}",
            f"{found['resident_gib']:.2f}",
            f"{found['resident_error']:+.1%}",
            f"{found['tensors_error']:+.1%}",
        ]
        for name, found in RESULTS["settings"].items()
    ]


@pytest.mark.parametrize("name", RESULTS["settings"])
def test_recorded_measurements_are_within_target_of_prediction(name: str) -> None:
    found, setting = RESULTS["settings"][name], SETTINGS[name]
    plan = predicted(setting, sft_config(setting, "data", "model", "run"), found["loss_fraction"])
    assert plan.memory.peak_bytes / GIB == pytest.approx(found["predicted_gib"])
    for measured in ("resident_gib", "tensors_gib"):
        assert abs(plan.memory.peak_bytes / GIB / found[measured] - 1) <= RESULTS["target"]


ON_GPUS = {
    (gpu, part["part"]): {row["name"]: row for row in part["rows"]}
    for gpu in ("h100", "h200")
    for part in json.loads((ROOT / f"benchmarks/results/gpu_{gpu}.json").read_text())["parts"]
    if part["part"].startswith("SFT") and "tokens of a row" in {row["name"] for row in part["rows"]}
}


@functools.cache
def dimensions(shape: str, *overrides: str) -> ModelShape:
    """Cached, because it keeps the counted activations of compiled layers, which take seconds."""
    return SHAPES[shape].dimensions(load_config("sft", [*overrides]).model)


@pytest.mark.parametrize(("gpu", "part"), ON_GPUS)
def test_measurements_on_gpus_are_within_target_of_prediction(gpu: str, part: str, tmp_path: Path) -> None:
    rows, shape = ON_GPUS[gpu, part], part.removeprefix("SFT ").split(",")[0]
    tokens, adapters = rows["tokens of a row"], [LORA] if "LoRA" in part else []
    overrides = [
        f"data.max_tokens_per_gpu={tokens['value']}",
        f"model.fsdp_config.keep_gathered={str(tokens['note'] == 'gathered once per step').lower()}",
        *([COMPILED] if "compiled" in part else []),
        *([NARROW] if "bf16 weights" in part else []),
        *adapters,
    ]
    config = config_of(GPUCheckSettings(str(tmp_path), 1, False), shape, overrides)
    model, cluster = dimensions(shape, *adapters), Cluster(HARDWARE[gpu], 1, 1)
    plan = make_plan(config, model, cluster, DataLengths(are_equal=True))
    assert plan.memory.peak_bytes / GIB == pytest.approx(rows["peak of allocated memory"]["value"], rel=0.015)
