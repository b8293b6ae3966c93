"""A command line written for verl's own trainer: its keys, its defaults, and how its paths resolve."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
import torch

from verl_ext.config.schema import value_at
from verl_ext.data.chat_template import pick
from verl_ext.errors import UserError
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.launch.configure import configure, resolve_config
from verl_ext.launch.preflight import check_settings
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.stages import SFTConfig, VLMSFTConfig, load_config

GSM8K = (
    "data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet", "data.prompt_key=prompt",
    "data.response_key=extra_info", "+data.prompt_dict_keys=['content']", "++data.response_dict_keys=['answer']",
    "data.micro_batch_size_per_gpu=8", "model.partial_pretrain=google/gemma-2b-it", "trainer.project_name=gsm8k-sft",
    "trainer.experiment_name=gemma", "trainer.total_epochs=3", "trainer.logger=['console','wandb']",
    "trainer.default_hdfs_dir=null", "model.lora_rank=32", "model.target_modules=all-linear", "trainer.nnodes=1",
)  # fmt: skip
"""As verl's examples have it."""


@pytest.fixture
def stock_run(tmp_path: Path) -> Path:
    """A run directory with only the files that these tests read."""
    checkpoint = tmp_path / "somewhere/sft/global_step_2"
    checkpoint.mkdir(parents=True)
    torch.save({}, checkpoint / "model_world_size_1_rank_0.pt")
    return checkpoint.parent


def test_verl_keys_keep_their_meaning(stock_run: Path) -> None:
    config = configure(parse_arguments(["sft", "8", *GSM8K, f"trainer.default_local_dir={stock_run}"]))
    check_settings(config)
    assert isinstance(config, SFTConfig)
    data = config.data
    assert (config.recipe, config.trainer.n_gpus_per_node, data.micro_batch_size_per_gpu) == ("verl", 8, 8)
    assert (data.prompt_dict_keys, data.response_dict_keys) == (["content"], ["answer"])
    # not overridden, so verl's defaults; the default recipe has others
    assert (data.train_batch_size, data.max_length, config.optim.lr, list(config.prepare)) == (256, 1024, 1e-5, [])
    assert load_config("sft", GSM8K).data.train_batch_size == 32


def test_default_recipe_is_used_without_verl_checkpoints(stock_run: Path) -> None:
    elsewhere = f"trainer.default_local_dir={stock_run.parent}"
    assert resolve_config("sft", [*GSM8K, elsewhere]).recipe == "quickstart"
    assert resolve_config("sft", []).recipe == "quickstart"
    named = ["recipe=gsm8k", f"trainer.default_local_dir={stock_run}"]
    assert resolve_config("sft", named).recipe == "gsm8k"
    begins = [elsewhere, f"trainer.resume_from_path={stock_run}/global_step_2"]
    assert resolve_config("sft", begins).recipe == "verl"


def test_overrides_only_valid_in_default_recipe_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's defaults have no save to export and no keys of other stages."""
    assert resolve_config("sft", ["trainer.checkpoint.export.every=400"]).recipe == "quickstart"
    monkeypatch.setattr("verl_ext.config.recipes.default_recipe", lambda command: "budget_vlm")
    config = resolve_config("sft", ["configurations.share=0.5"])
    assert isinstance(config, VLMSFTConfig) and config.configurations.share == 0.5


def test_verl_recipe_is_kept_after_its_checkpoints_are_removed(stock_run: Path) -> None:
    about = {"project": "p", "experiment": "e", "stage": "sft", "config_digest": ""}
    RunRecord(stock_run).mark_waiting(recipe="verl", **about)
    (stock_run / "global_step_2/model_world_size_1_rank_0.pt").unlink()
    assert resolve_config("sft", [f"trainer.default_local_dir={stock_run}"]).recipe == "verl"


def test_paths_resolve_from_caller_directory(stock_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = stock_run.parent
    (caller / "model").mkdir()
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(caller))
    words = ["data.train_files=[a.parquet,/b.parquet]", "data.val_files=c.parquet", "trainer.default_local_dir=sft"]

    def paths(model: str) -> tuple[list[str], str, str, SFTConfig]:
        config = resolve_config("sft", [*words, f"model.partial_pretrain={model}"])
        assert isinstance(config, SFTConfig)
        return list(config.data.train_files), str(config.data.val_files), config.model.partial_pretrain, config

    files, val, model, config = paths("model")
    assert files == [f"{caller}/a.parquet", "/b.parquet"]
    assert (val, model, config.trainer.default_local_dir) == (f"{caller}/c.parquet", f"{caller}/model", f"{caller}/sft")
    assert paths("google/gemma-2b-it")[2] == "google/gemma-2b-it"  # a name on the Hub


def test_inputs_of_other_stages_resolve_from_caller_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path))
    keys = {
        "model.sft_run": "sft",
        "controller.init_from": "best_model.pt",
        "controller.importance_file": "blocks.json",
    }
    keys["latency.file"] = "latency.json"
    for name in keys.values():
        (tmp_path / name).touch()
    config = resolve_config("grpo", ["recipe=budget_controller", *(f"{key}={name}" for key, name in keys.items())])
    assert {key: value_at(config, key) for key in keys} == {key: str(tmp_path / name) for key, name in keys.items()}
    absent = resolve_config("grpo", ["recipe=budget_controller", "latency.file=nowhere.json"])
    assert value_at(absent, "latency.file") == "nowhere.json"


def test_contradicting_rank_counts_are_rejected() -> None:
    configure(parse_arguments(["sft", "8", "trainer.n_gpus_per_node=8", "trainer.nnodes=1"]))
    configure(parse_arguments(["sft", "8", "+trainer.n_gpus_per_node=8", "trainer={nnodes: 1}"]))
    words = ("trainer.n_gpus_per_node=4", "trainer.nnodes=2", "+trainer.nnodes=3", "++trainer.n_gpus_per_node=2")
    for word in (*words, "trainer={nnodes: 3}", "trainer={n_gpus_per_node: 1, nnodes: 1}"):
        with pytest.raises(UserError, match=r"trainer\.\w+=\d contradicts (NNODES.* 1|the first argument.* 8);"):
            configure(parse_arguments(["sft", "8", word]))


def test_nested_columns_are_read_as_in_verl() -> None:
    one_turn = [{"content": "2 + 2?", "role": "user"}]
    assert pick(one_turn, ["content"]) == "2 + 2?"
    assert pick({"question": "2 + 2?"}, ["question"]) == "2 + 2?"


def test_user_without_home_directory_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no entry in the password file
    assert resolve_config("sft", [f"trainer.default_local_dir={tmp_path}"]).recipe == "quickstart"
    with pytest.raises(UserError, match="data.train_files is '~/x.parquet', but HOME is not set; set it, or write"):
        resolve_config("sft", ["data.train_files='~/x.parquet'"])
