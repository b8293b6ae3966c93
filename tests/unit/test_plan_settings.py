"""From configuration to one rank's step: micro-batches, token budgets, GRPO updates, and rejected settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Gemma2Config, Qwen2Config

from tests.helpers.models import cache_as_hub
from tests.helpers.plans import FIXED
from verl_ext.config.schema import keys
from verl_ext.errors import UserError
from verl_ext.plan import model_shape
from verl_ext.plan.__main__ import PlanOptions, stage_of
from verl_ext.plan.model_shape import find_model, named_model, settle
from verl_ext.plan.step_time import HARDWARE
from verl_ext.plan.workload import DataLengths, RankWorkload, require_formulas, workload_of
from verl_ext.trainer.stages import GRPOConfig, SFTConfig, load_config

NUMEL = 7_615_616_512


def config(*overrides: str, recipe: str = "qwen2.5_coder_7b", command: str = "sft") -> SFTConfig | GRPOConfig:
    loaded = load_config(command, [f"recipe={recipe}", *FIXED[command], *overrides])
    assert isinstance(loaded, SFTConfig | GRPOConfig)
    return loaded


def workload(*overrides: str, gpus: int = 8, lengths: DataLengths = DataLengths(), **which: str) -> RankWorkload:  # noqa: B008
    return workload_of(config(*overrides, **which), NUMEL, NUMEL, gpus, HARDWARE["h100"], lengths)


def test_workload_of_7b_recipe_on_eight_gpus() -> None:
    work = workload()
    assert (work.samples, work.rows, work.row_tokens, work.num_micro_batches) == (128, 2, 4096, 8)
    assert (work.master_bytes, work.compute_bytes, work.reduce_bytes) == (4, 2, 4)
    assert work.checkpointing and not work.keeps_gathered and not work.fused_loss
    assert work.logit_tokens == work.loss_tokens == 8192


def test_weights_in_bf16_are_computed_with_in_configured_precision() -> None:
    work = workload("model.fsdp_config.model_dtype=bf16", "model.mixed_precision=fp32")
    assert (work.master_bytes, work.compute_bytes, work.reduce_bytes) == (2, 4, 4)


def test_rank_with_less_than_micro_batch_processes_remainder() -> None:
    work = workload(gpus=128)
    assert (work.rows, work.num_micro_batches, work.attention) == (1, 1, "causal")


def test_token_budget_counts_tokens_not_samples() -> None:
    work = workload("data.max_tokens_per_gpu=16384", lengths=DataLengths(mean=1024))
    assert (work.rows, work.num_micro_batches) == (4, 1)
    packed = workload("data.packing=true", "data.max_tokens_per_gpu=8192")
    assert (packed.rows, packed.row_tokens, packed.num_micro_batches) == (1, 8192, 8)
    assert packed.attention == "flash"  # in bf16 on a GPU
    assert workload("data.packing=true", "model.mixed_precision=fp32").attention == "packed"


def test_budget_below_longest_sample_holds_one_sample() -> None:
    work = workload("data.max_tokens_per_gpu=100")
    assert (work.rows, work.row_tokens) == (1, 4096)


def test_packing_without_budget_joins_rows() -> None:
    work = workload("data.packing=true")
    assert (work.rows, work.row_tokens, work.num_micro_batches) == (1, 8192, 8)


def test_workload_reads_switches_of_configuration() -> None:
    work = workload("model.fused_loss=true", "model.fsdp_config.keep_gathered=true")
    assert work.fused_loss and work.keeps_gathered


def test_auto_keeps_small_weights_gathered() -> None:
    settings = config()
    settings.model.fsdp_config.keep_gathered = "auto"
    # 6 bytes a parameter, in 15% of 80 GB
    assert workload_of(settings, 1_999_999_999, 1_999_999_999, 8, HARDWARE["h100"], DataLengths()).keeps_gathered
    # 2 bytes a frozen parameter
    assert workload_of(settings, 5_999_999_999, 0, 8, HARDWARE["h100"], DataLengths()).keeps_gathered
    assert not workload_of(settings, 2_000_000_001, 2_000_000_001, 8, HARDWARE["h100"], DataLengths()).keeps_gathered


@pytest.mark.parametrize(
    ("arguments", "hardware", "expected"),
    [
        ("null", "h100", "fused"),
        ("null", "cpu", "for-loop"),
        ("{fused: true}", "cpu", "fused"),
        ("{fused: false}", "h100", "for-loop"),
        ("{foreach: true}", "h100", "foreach"),
        ("{foreach: false}", "h100", "for-loop"),
        ("{foreach: true}", "cpu", "foreach"),
    ],
)
def test_optimizer_implementation_is_as_set_or_torch_default(arguments: str, hardware: str, expected: str) -> None:
    settings = config(f"optim.override_optimizer_config={arguments}")
    work = workload_of(settings, NUMEL, NUMEL, 8, HARDWARE[hardware], DataLengths())
    assert work.optimizer_implementation == expected


def test_loss_fraction_scales_loss_tokens() -> None:
    assert workload(lengths=DataLengths(loss_fraction=0.5)).loss_tokens == 4096


def test_grpo_counts_completions_and_updates() -> None:
    work = workload(recipe="qwen2.5_coder_7b_code", command="grpo")
    assert (work.samples, work.num_updates, work.num_micro_batches, work.rows) == (512, 2, 8, 4)
    assert (work.logit_tokens, work.tokens, work.forward_passes) == (4 * 2048, 4 * 4096, 1)


@pytest.mark.parametrize(
    ("overrides", "gpus", "says"),
    [
        (["data.train_batch_size=100"], 8, "set data.train_batch_size=104"),
        (["ulysses_sequence_parallel_size=2", "use_remove_padding=true"], 8, "size=2; plan with .*size=1"),
        (["optim.optimizer=SGD"], 8, "optimizer torch.optim.SGD; plan with optim.optimizer=AdamW"),
        (["optim.optimizer_impl=bitsandbytes.optim"], 8, "optimizer bitsandbytes.optim.AdamW; plan with"),
    ],
)
def test_rejects_unsupported_settings(overrides: list[str], gpus: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        workload(*overrides, gpus=gpus)


@pytest.mark.parametrize(
    ("override", "hardware", "says"),
    [
        ("actor.ppo_mini_batch_size=1000", "h100", "must be a multiple of actor.ppo_mini_batch_size=1000"),
        ("actor.ppo_mini_batch_size=24", "h100", "must be a multiple of actor.ppo_mini_batch_size=24"),
        ("rollout.tensor_model_parallel_size=3", "h100", "which does not divide the 8 ranks"),
        ("rollout.tensor_model_parallel_size=16", "h100", "which does not divide the 8 ranks"),
        ("rollout.tensor_model_parallel_size=2", "cpu", "above 1 needs GPUs"),
        ("actor.policy_loss.loss_mode=clip_cov", "h100", "set data.micro_batch_size_per_gpu=32"),
    ],
)
def test_rejects_what_launch_rejects(override: str, hardware: str, says: str) -> None:
    settings = config(override, recipe="qwen2.5_coder_7b_code", command="grpo")
    with pytest.raises(UserError, match=says):
        workload_of(settings, NUMEL, NUMEL, 8, HARDWARE[hardware], DataLengths())


def test_rejects_other_stages_and_impossible_lengths() -> None:
    with pytest.raises(UserError, match="the planner does not support the stage vlm_sft; see docs"):
        require_formulas(load_config("sft", ["recipe=budget_vlm"]))
    with pytest.raises(UserError, match="mean_length=5000 is more than the longest sample of 4096"):
        workload(lengths=DataLengths(mean=5000))


def test_parses_settings_and_overrides() -> None:
    words = ["recipe=qwen2.5_coder_7b", "gpus=8,64", "mfu=0.5", "hardware=h200", "mean_length=700", "optim.lr=1"]
    options, overrides = PlanOptions.parse(words)
    assert options.gpus == [8, 64] and options.mfu == 0.5 and options.hardware == "h200"
    assert options.mean_length == 700 and overrides == ["recipe=qwen2.5_coder_7b", "optim.lr=1"]
    assert PlanOptions.parse(["gpus=[2]"])[0].gpus == PlanOptions.parse(["gpus=2"])[0].gpus == [2]


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ([], "sft"),
        (["recipe=qwen2.5_coder_7b"], "sft"),
        (["recipe=qwen2.5_coder_7b_code"], "grpo"),
        (["recipe=gsm8k"], "sft"),
        (["recipe=gsm8k", "stage=grpo"], "grpo"),
    ],
)
def test_stage_defaults_to_that_of_recipe(words: list[str], stage: str) -> None:
    options, overrides = PlanOptions.parse(words)
    assert stage_of(options.stage, overrides) == stage


@pytest.mark.parametrize(
    ("file", "text", "stage"),
    [
        ("mine.yaml", "stage: grpo", "grpo"),
        ("grpo/mine.yaml", "stage: sft", "sft"),
        ("mine.yaml", "data: {}", "sft"),
        ("grpo/mine.yaml", "data: {}", "grpo"),
    ],
)
def test_stage_of_own_recipe_is_that_in_its_file(file: str, text: str, stage: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n")
    assert stage_of(None, [f"recipe={path}"]) == stage


def test_recipe_of_other_stage_names_the_option() -> None:
    with pytest.raises(UserError, match="recipe=qwen2.5_coder_7b is not for stage=grpo; set stage=sft"):
        stage_of("grpo", ["recipe=qwen2.5_coder_7b"])


def test_hardware_option_lists_every_name() -> None:
    assert keys(PlanOptions)["hardware"].takes == "h100, h200, a100 or cpu"
    assert list(HARDWARE) == ["h100", "h200", "a100", "cpu"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("gpus=0", r"gpus is \[0\]; it must be a list \[a, b\] of integers from 1 to 1000000"),
        ("gpus=many", r"sets 'gpus' to \['many'\], but it must be"),
        ("gpus=1.5", r"sets 'gpus' to \[1.5\], but it must be"),
        ("gpus=", "gpus is empty; specify one or more GPU counts"),
        ("mfu=40", "mfu is 40; it must be a number above 0 and at most 1"),
        ("disk_gbps=0", "disk_gbps is 0; it must be a number above 0"),
        ("mean_length=inf", "mean_length is inf; it must be a finite number"),
        ("hardware=h10", "sets 'hardware' to 'h10', but it must be h100, h200, a100 or cpu"),
        ("stage=eval", "sets 'stage' to 'eval', but it must be sft or grpo"),
    ],
)
def test_rejects_invalid_options(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PlanOptions.parse([word])


def test_rejects_attention_that_trainer_rejects() -> None:
    with pytest.raises(UserError, match="attn_implementation=flash_attention_2 does not support fp32"):
        config("model.attn_implementation=flash_attention_2", "model.mixed_precision=fp32")
    with pytest.raises(UserError, match="sdpa cannot cap attention scores, which gemma2 models need"):
        settle(config("model.attn_implementation=sdpa"), Gemma2Config(), is_gpu=True)
    with pytest.raises(UserError, match="attn_implementation=flash_attention_2 needs a GPU"):
        settle(config("model.attn_implementation=flash_attention_2"), Qwen2Config(), is_gpu=False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shape, "hub_answers", lambda timeout_s: False)


@pytest.mark.usefixtures("no_network")
def test_finds_model_in_home_directory_and_hub_cache(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(quickstart / "model")
    expected = json.loads((quickstart / "model/config.json").read_text())["hidden_size"]
    assert find_model(config("model.partial_pretrain=~/model"))[0].hidden_size == expected
    cache = cache_as_hub(quickstart / "model", "gpt2", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert find_model(config("model.partial_pretrain=gpt2"))[0].hidden_size == expected


@pytest.mark.usefixtures("no_network")
def test_builtin_dimensions_are_used_offline() -> None:
    found, notes = find_model(config())
    assert (found.hidden_size, found.num_hidden_layers, found.vocab_size) == (3584, 28, 152064)
    assert notes == ["Qwen/Qwen2.5-Coder-7B-Instruct cannot be read here; using built-in dimensions"]
    with pytest.raises(UserError, match="nobody/nothing is not on this machine, and the Hub cannot be reached"):
        find_model(config("model.partial_pretrain=nobody/nothing"))
    with pytest.raises(UserError, match="does not exist; run `python -m verl_ext.data.prepare quickstart --output"):
        find_model(config("model.partial_pretrain=data/none/model", recipe="quickstart"))


def test_model_of_sft_run_is_that_of_its_recipe() -> None:
    name, notes = named_model(config(recipe="gsm8k", command="grpo"))
    assert name == "Qwen/Qwen2.5-1.5B-Instruct" and "recipe=gsm8k" in notes[0]
    with pytest.raises(UserError, match="set model.partial_pretrain"):
        named_model(config("model.sft_run=checkpoints/other/run", recipe="gsm8k", command="grpo"))
