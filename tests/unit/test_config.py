"""Recipes, overrides and the checks before torchrun: accepted values, and the hints in error messages."""

from __future__ import annotations

import json
import math
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.helpers.models import cache_as_hub
from verl_ext.config.compose import override_of, parse_override, value_set_by
from verl_ext.config.recipes import RECIPES, recipe_summaries
from verl_ext.config.run_config import config_digest
from verl_ext.config.schema import as_dict, keys, to_yaml
from verl_ext.data.training_templates import read_chat_template
from verl_ext.errors import UserError
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.launch.configure import configure
from verl_ext.launch.preflight import check_data, check_settings
from verl_ext.model_files import check_model_files, is_hub_name, untrained_loss
from verl_ext.trainer.stages import STAGES, GRPOConfig, RunConfig, SFTConfig, load_config, stages_of

SHIPPED = sorted(
    (path.parent.name, path.stem) for command in ("sft", "grpo") for path in (RECIPES / command).glob("*.yaml")
)


@pytest.mark.parametrize(("command", "recipe"), SHIPPED)
def test_shipped_recipes_pass_settings_checks(command: str, recipe: str) -> None:
    config = configure(parse_arguments([command, "1", f"recipe={recipe}"]))
    assert config.recipe == recipe and config.stage in stages_of(command) and recipe_summaries(command)[recipe]
    for ranks in (1, 2, 4, 8):
        config.trainer.n_gpus_per_node = ranks
        check_settings(config)


def test_7b_recipe_has_specified_hyperparameters() -> None:
    config = load_config("sft", ["recipe=qwen2.5_coder_7b"])
    assert (config.data.train_batch_size, config.data.micro_batch_size_per_gpu, config.data.max_length) == (
        128,
        2,
        4096,
    )
    assert (config.optim.lr, list(config.optim.betas), config.optim.weight_decay) == (2e-5, [0.9, 0.95], 0.01)
    assert (config.trainer.save_freq, config.trainer.test_freq, config.trainer.max_ckpt_to_keep) == (500, 500, 5)
    assert config.trainer.default_local_dir == "checkpoints/rlvr_coding_model/phase1_sft_qwen7b_coder"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("optm.lr=1", "did you mean 'optim.lr'"),
        ("data.batch_size=3", "did you mean 'data.train_batch_size'"),
        ("data.prefetch_batches=2", "known keys of 'data' are .*train_batch_size, "),
        ("optim.lr=fast", "must be a number"),
        ("data.train_batch_size=1.5", "must be an integer"),
        ("data.train_batch_size=true", "must be an integer"),
        ("data.multiturn.enable=3", "must be true or false"),
        ("data.multiturn={enabled: true}", "did you mean 'data.multiturn.enable'"),
        ("optim.betas=0.9", "must be a list"),
        ("trainer.save_freq=null", "needs a value"),
        ("~trainer.checkpoint.save_contents", "needs a value"),
        ("data.train_files=[null]", "must be a string"),
        ("+trainer=3", "not a configuration key"),
        ("+trainer.seed.x=1", "not a configuration key"),
        ("optim.lr@x=7", "has the Hydra package '@x', which has no effect here"),
        ("recipe=quickstrt", "did you mean recipe=quickstart"),
        ("a b=", "not an override of the form key=value"),
        (
            "data.train_files=~/it's/a b",
            "'data.train_files=.*quote the value inside shell quotes, as in 'key=\"value\"'",
        ),
        ('data.train_files=a b"', "'data.train_files=.*quote the value inside shell quotes, as in \"key='value'\""),
        ("data.train_files=glob(*)", "'data.train_files=.* is a sweep"),
    ],
)
def test_mistyped_override_is_rejected_with_hint(override: str, names: str) -> None:
    with pytest.raises(UserError, match=names):
        load_config("sft", [override])


def test_overrides_follow_hydra() -> None:
    config = load_config(
        "sft",
        ["optim.lr=1e-4", "data.train_files=[a,b]", "trainer.logger=console", "~data.val_files", "+mine.extra=1"]
        + ["data.apply_chat_template_kwargs.enable_thinking=false", "optim.override_optimizer_config={fused: true}"],
    )
    assert config.optim.lr == 1e-4
    assert list(config.data.train_files) == ["a", "b"]
    assert list(config.trainer.logger) == ["console"]
    assert config.data.val_files is None
    assert vars(config)["mine"] == {"extra": 1}
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.optim.override_optimizer_config == {"fused": True}


@pytest.mark.parametrize("override", ["hydra.run.dir=/tmp/x", "hydra/job_logging=disabled"])
def test_keys_of_hydra_are_rejected_without_advice_to_add_them(override: str) -> None:
    with pytest.raises(UserError, match="Hydra's own keys have no effect here, so remove it$"):
        load_config("sft", [override])


def test_null_and_list_values_are_accepted() -> None:
    words = ["trainer.max_ckpt_to_keep=null", "data.val_files=null", "model.target_modules=[q_proj,v_proj]"]
    config = load_config("sft", words)
    assert config.trainer.max_ckpt_to_keep is config.data.val_files is None
    assert list(config.model.target_modules) == ["q_proj", "v_proj"]


def test_error_in_recipe_file_names_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data:\n  train_batchsize: 3\n")
    with pytest.raises(UserError, match="mine.yaml sets 'data.train_batchsize'.*did you mean 'data.train_batch_size'"):
        load_config("sft", [f"recipe={recipe}"])
    recipe.write_text("a: [")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config("sft", [f"recipe={recipe}"])


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("model.strategy", "fsdp", "fsdp2"),
        ("model.mixed_precision", "fp8", "auto, bf16 or fp32"),
        ("trainer.total_training_steps", "abc", "integer of at least 1, or null for all epochs"),
        ("trainer.max_ckpt_to_keep", 0, "integer of at least 1"),
        ("data.max_length", None, "needs a value"),
        ("optim.lr", -1, "must be a number of at least 0"),
        ("optim.lr", math.inf, "must be a finite number of at least 0"),
        ("optim.lr", math.nan, "must be a number of at least 0"),
        ("optim.clip_grad", -1, "must be a number of at least 1e-12"),
        ("optim.clip_grad", 0, "must be a number of at least 1e-12"),
        ("optim.betas", [0.9], "two numbers"),
        ("optim.betas", [2, 3], "of at least 0 and below 1"),
        ("trainer.seed", -1, "integer from 0 to 2147483647"),
        ("data.num_workers", -1, "integer from 0 to 256"),
        ("trainer.default_local_dir", " ", "is empty"),
        ("trainer.experiment_name", "", r"is empty; set it \(Run name"),
        ("trainer.default_hdfs_dir", "hdfs://x", "has no effect"),
        ("optim.lr_scheduler_type", "cosine", "set optim.lr_scheduler"),
        ("trainer.checkpoint.save_contents", ["optimizer"], "lacks 'model'"),
        ("trainer.checkpoint.save_contents", ["model", "weights"], "weights"),
        ("trainer.checkpoint.load_contents", ["modle"], "modle"),
        ("data.micro_batch_size", 4, "micro_batch_size_per_gpu"),
        ("data.train_max_samples", 0, "at least 1, or -1 for all"),
        ("data.num_workers", 100_000, "from 0 to 256"),
        ("optim.num_cycles", float("nan"), "optim.num_cycles is nan"),
        ("optim.num_cycles", float("inf"), "optim.num_cycles is inf"),
        ("trainer.max_ckpt_to_keep", 99999999999, "at most 2147483647, or null for all"),
        ("trainer.total_training_steps", 99999999999, "at most 2147483647, or null for all epochs"),
        ("trainer.checkpoint.export.every", 99999999999, "at most 2147483647, or null for every save"),
        ("trainer.resume_mode", "resume_path", "has no path; set trainer.resume_from_path"),
        ("trainer.resume_from_path", "/nowhere/global_step_1", "not a global_step_N directory"),
        ("trainer.resume_from_path", "{directory}/global_step_1.tmp", "not a global_step_N directory"),
    ],
)
def test_invalid_values_are_rejected(key: str, value: object, names: str, tmp_path: Path) -> None:
    (tmp_path / "global_step_1.tmp").mkdir()
    value = value.format(directory=tmp_path) if isinstance(value, str) else value
    text = json.dumps(value) if value != value or value not in (math.inf, -math.inf) else "inf"
    with pytest.raises(UserError, match=names):
        check_settings(load_config("sft", [f"{key}={'nan' if value != value else text}"]))


@pytest.mark.parametrize(("batch", "ranks", "sequence"), [(33, 2, 1), (32, 3, 2), (32, 2, 2)])
def test_indivisible_batch_is_rejected(batch: int, ranks: int, sequence: int) -> None:
    words = [f"data.train_batch_size={batch}", f"ulysses_sequence_parallel_size={sequence}"]
    with pytest.raises(UserError, match="divi|multiple|use_remove_padding"):
        load_config("sft", words).check_ranks(ranks)


def with_batches(config: RunConfig, batch: int, mini_batch: int | None) -> GRPOConfig:
    assert isinstance(config, GRPOConfig)
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = batch, mini_batch
    return config


@pytest.mark.parametrize(
    ("batch", "mini_batch", "ranks", "working", "fewer"),
    [
        (30, 30, 8, (32, 32), 6),
        (30, None, 8, (32, None), 6),
        (30, 15, 8, (32, 16), 5),
        (64, 24, 8, (64, 32), None),
        (64, 30, 8, (64, 32), None),
        (4, None, 8, (8, None), 4),
        (33, None, 2, (34, None), None),
        (8, 3, 1, (8, 4), None),
        (8, 16, 2, (8, 8), None),
    ],
)
def test_indivisible_batch_error_suggests_working_values(
    batch: int, mini_batch: int | None, ranks: int, working: tuple[int, int | None], fewer: int | None
) -> None:
    keys = ("data.train_batch_size", "actor.ppo_mini_batch_size")
    config = with_batches(load_config("grpo", []), batch, mini_batch)
    with pytest.raises(UserError) as refused:
        config.check_ranks(ranks)
    said = str(refused.value).partition("; set ")[2]
    changed = {key: int(value) for key, value in re.findall(r"([\w.]+)=(\d+)", said)}
    given = dict(zip(keys, (batch, mini_batch)))
    assert changed == {key: value for key, value in zip(keys, working) if value != given[key]}
    assert re.findall(r"start (\d+) ranks", said) == ([] if fewer is None else [str(fewer)])
    with_batches(config, *working).check_ranks(ranks)
    if fewer is not None:
        with_batches(config, batch, mini_batch).check_ranks(fewer)


def test_rank_suggestion_respects_engines_and_nodes() -> None:
    config = with_batches(load_config("grpo", []), 30, None)
    config.rollout.tensor_model_parallel_size = 4
    with pytest.raises(UserError, match=r"set data.train_batch_size=32$"):
        config.check_ranks(8)
    config.rollout.tensor_model_parallel_size, config.trainer.nnodes = 1, 2
    with pytest.raises(UserError, match="set data.train_batch_size=32, or start 10 ranks"):
        config.check_ranks(16)


def with_data(quickstart: Path, *overrides: str) -> RunConfig:
    files = [f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"]
    return load_config("sft", [*files, f"model.partial_pretrain={quickstart}/model", *overrides])


def check_model(config: RunConfig) -> None:
    check_model_files(str(config.model.partial_pretrain), config.model.trust_remote_code)


def test_data_and_model_are_checked_before_torchrun(quickstart: Path, tmp_path: Path) -> None:
    check_data(with_data(quickstart))
    check_model(with_data(quickstart))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is not parquet")
    (tmp_path / "chats.txt").write_text("chats")
    (tmp_path / "config.json").write_text("{")
    for override, names in {
        "data.train_files=/nowhere.parquet": "is not a file",
        f"data.train_files={tmp_path}": r"names the directory.*such as data.train_files=\S+broken.parquet$",
        "data.train_files=s3://bucket/x.parquet": "names the remote file",
        f"data.train_files={broken}": "not a readable parquet file.*prepare it again",
        f"data.train_files={tmp_path}/chats.txt": r"not a readable parquet file.*\.parquet, \.jsonl",
        "data.multiturn.messages_key=chat": "no column 'chat'.*its columns are messages.*enable=false",
        "data.multiturn.enable=false": "no column 'question'.*; set data.prompt_key to one of them",
        "data.train_batch_size=501": "fewer than one global batch of 501; set data.train_batch_size=496$",
        "data.train_files=[]": "is empty",
    }.items():
        with pytest.raises(UserError, match=names):
            check_data(with_data(quickstart, override))
    for path, names in {
        "/nowhere": "no model at",
        str(tmp_path): "not valid JSON",
        str(quickstart): "no config.json",
    }.items():
        with pytest.raises(UserError, match=names):
            check_model(with_data(quickstart, f"model.partial_pretrain={path}"))


@pytest.mark.parametrize(
    ("batch", "mini_batch", "ranks", "fix"),
    [
        (512, 512, 3, "set data.train_batch_size=498 actor.ppo_mini_batch_size=498"),
        (512, 128, 2, "set data.train_batch_size=384"),
        (512, None, 3, "set data.train_batch_size=498"),
        (1024, None, 512, "provide at least 512, one per data-parallel rank, and set data.train_batch_size=512"),
    ],
)
def test_small_data_set_error_suggests_working_values(
    quickstart: Path, batch: int, mini_batch: int | None, ranks: int, fix: str
) -> None:
    words = [f"data.train_files={quickstart}/train.parquet", "data.val_files=[]", "data.eval_every_steps=0"]
    config = with_batches(load_config("grpo", words), batch, mini_batch)
    config.data.prompt_key, config.trainer.n_gpus_per_node = "messages", ranks
    with pytest.raises(UserError) as refused:
        check_data(config)
    assert str(refused.value).endswith(f"fewer than one global batch of {batch}; {fix}")
    with_batches(config, *(int(each) for each in re.findall(r"=(\d+)", fix)), *([mini_batch] * (fix.count("=") < 2)))
    config.check_ranks(ranks)


HUB_NAMES = ("gpt2", "Qwen/Qwen2.5-0.5B", "distil-bert_base.v1")


def check_named(model: str) -> None:
    check_model(load_config("sft", [f"model.partial_pretrain={model}"]))


@pytest.mark.parametrize("name", HUB_NAMES)
def test_hub_name_is_left_to_transformers_if_hub_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # answers with an error
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, daemon=True).start()
        check_named(name)
        server.shutdown()
    with pytest.raises(UserError, match=rf"no model at .*/{name}, and http://127\.0\.0\.1:\d+ does not answer"):
        check_named(name)


@pytest.mark.parametrize("name", HUB_NAMES)
def test_hub_name_must_be_cached_when_offline(
    name: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        check_named(name)
    cache_as_hub(quickstart / "model", name, tmp_path)
    check_named(name)


@pytest.mark.parametrize("name", ["gpt2-", "a..b", "openai/gpt..x"])
def test_invalid_hub_name_is_rejected_when_offline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="correct model.partial_pretrain"):
        check_named(name)


def test_hub_names_are_distinguished_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("local", "models/local"):
        Path(name).mkdir(parents=True)
    assert all(map(is_hub_name, (*HUB_NAMES, "nowhere/local")))
    paths = ("local", "models/other", "./gpt2", "../gpt2", "~/gpt2", "/gpt2", "a/b/c", "data/model", "checkpoints/x")
    assert not any(map(is_hub_name, (*paths, "hdfs://host/model", "my model", "")))
    for name in ("models/other", "./gpt2", "data/model"):
        with pytest.raises(UserError, match=f"no model at {tmp_path}"):
            check_named(name)


def test_tilde_expands_to_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    (tmp_path / "model").symlink_to(quickstart / "model")
    words = ["data.custom_cls.path=~/c.py", "model.lora_adapter_path=~/adapters", "trainer.resume_from_path=~/r"]
    named = ["data.chat_template=~/t.jinja", "model.partial_pretrain=~/model", "trainer.default_local_dir=~/runs/a"]
    config = load_config("sft", [*words, *named])
    assert isinstance(config, SFTConfig)
    assert config.trainer.default_local_dir == f"{tmp_path}/runs/a"
    assert load_config("sft", ["trainer.default_local_dir='~'"]).trainer.default_local_dir == str(tmp_path)
    assert config.trainer.resume_from_path == f"{tmp_path}/r"
    assert (config.data.custom_cls.path, config.model.lora_adapter_path) == (f"{tmp_path}/c.py", f"{tmp_path}/adapters")
    assert read_chat_template(str(config.data.chat_template)) == "{{ messages }}"
    check_model(config)
    files = ["data.train_files=[~/a.parquet,'~/b c.parquet']", "data.val_files='~/v.parquet'"]
    data = load_config("sft", files).data
    assert (list(data.train_files), data.val_files) == (["~/a.parquet", "~/b c.parquet"], "~/v.parquet")


PATHS = ("~/my data/x.parquet", "/my data/x.parquet", "my data/x.parquet", "~/a (1)/x", "./a (1)/x", "/é#/b=~c", "~")


@pytest.mark.parametrize("path", PATHS)
def test_paths_need_only_shell_quoting(path: str) -> None:
    for form, value in {
        "data.train_files={}": path,
        "+data.train_files= {} ": path,
        "data={{train_files: {}}}": {"train_files": path},
        "data.train_files=[{0},b c, {0} ]": [path, "b c", path],
        "data.train_files={0},b c,{0}": [path, "b c", path],
        "data.train_files=['/a, /b=/c',{}]": ["/a, /b=/c", path],
    }.items():
        text = form.format(path)
        assert value_set_by(parse_override(text, keys(SFTConfig)), text) == value


def test_named_items_of_list_need_only_shell_quoting() -> None:
    text = "reward.functions=[near=/my dir/mine.py:near*0.5, reward_correct, 'a=b','c,d=e']"
    expected = ["near=/my dir/mine.py:near*0.5", "reward_correct", "a=b", "c,d=e"]
    assert value_set_by(parse_override(text, keys(GRPOConfig)), text) == expected


AS_TYPED = ("12e4567", "2026_11_27", "1e-5", ".5", "0x1f", "007", "a,b", "h#1", "é (1)", "it's", '[a]{b}"c=')
WITHOUT_SYNTAX = str.maketrans(dict.fromkeys("'[]{}\""))


@pytest.mark.parametrize("text", AS_TYPED)
def test_text_is_kept_as_typed(text: str) -> None:
    plain = text.translate(WITHOUT_SYNTAX)
    config = load_config("sft", [f"trainer.experiment_name={text}", f"+data.val_files=[{plain}, x]"])
    assert isinstance(config, SFTConfig)
    assert (config.trainer.experiment_name, config.trainer.run_dir.name) == (text, text)
    assert config.data.val_files == [*plain.split(","), "x"]


@pytest.mark.parametrize("text", [*AS_TYPED, "null", "true", "[a,b]", "{a: 1}", "'a'", '"', "a\\,b\\"])
def test_suggested_commands_keep_text(text: str) -> None:
    override = override_of("trainer.default_local_dir", text)
    assert load_config("sft", [override]).trainer.default_local_dir == text


@pytest.mark.parametrize(("typed", "value"), [("a\\,b", "a,b"), ("'1 '", "1 "), ("${stage}_1e5", "sft_1e5")])
def test_text_may_have_quotes_escapes_and_interpolations(typed: str, value: str) -> None:
    assert load_config("sft", [f"trainer.experiment_name={typed}"]).trainer.experiment_name == value


def test_recipe_keeps_text_of_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "trainer: {experiment_name: 2026_11_27, project_name: 1e-5}\ndata: {train_files: [007, a, 1.0]}\n"
    )
    config = load_config("sft", [f"recipe={recipe}", "optim.lr=1e-5"])
    assert config.trainer.default_local_dir == "checkpoints/1e-5/2026_11_27"
    assert (config.data.train_files, config.optim.lr) == (["007", "a", "1.0"], 1e-5)
    recipe.write_text("")
    assert load_config("sft", [f"recipe={recipe}"]).stage == "sft"


def test_unresolved_interpolation_is_blamed_on_its_source(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as told:
            configure(parse_arguments(["sft", "1", *words]))
        return str(told.value)

    for text in ("run_${y}", "run_${y"):
        said = refused(f"trainer.experiment_name={text}")
        assert said.startswith("the command line sets 'trainer.experiment_name'")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: {project_name: '${nowhere}', experiment_name: '${trainer.project_name}_1'}\n")
    for words in ([], ["trainer.default_local_dir=x/${trainer.experiment_name}"]):
        assert refused(f"recipe={recipe}", *words).startswith(f"{recipe} sets 'trainer.project_name'")


def test_run_directory_may_refer_to_added_key() -> None:
    words = ["+mine.number=7", "trainer.experiment_name=run_${mine.number}"]
    assert configure(parse_arguments(["sft", "1", *words])).trainer.experiment_name == "run_7"


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "data.val_files", "+mine.note"])
def test_literal_interpolation_is_rejected(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key.lstrip('+')} is .*remove them"):
        configure(parse_arguments(["sft", "1", f"{key}=/tmp/a\\${{x}}"]))


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "data.train_files", "model.partial_pretrain"])
def test_home_of_unknown_user_is_rejected(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} .*no user nobody_at_all"):
        load_config("sft", [f"{key}=~nobody_at_all/x"])


def digest_of(*words: str, command: str = "sft") -> str:
    return config_digest(as_dict(load_config(command, words)))


def test_config_digest_ignores_ranks_device_and_monitoring() -> None:
    base = digest_of()
    assert digest_of("trainer.n_gpus_per_node=2", "trainer.device=cpu") == base
    assert digest_of("optim.lr=1e-3") != base
    assert digest_of("trainer.log_sample_tokens=true", command="grpo") == digest_of(command="grpo")
    assert digest_of("trainer.wandb_proxy=http://proxy") == base


def save_contents(command: str, *words: str) -> set[str]:
    return set(load_config(command, list(words)).trainer.checkpoint.save_contents)


@pytest.mark.parametrize(("command", "stage"), [(stage.command, name) for name, stage in STAGES.items()])
def test_checkpoints_include_export_unless_disabled(command: str, stage: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"stage: {stage}\ntrainer: {{project_name: p}}\n")
    assert "hf_model" in save_contents(command, f"recipe={recipe}")
    shards = "[model,optimizer,extra]"
    typed = f"trainer.checkpoint.save_contents={shards}"
    assert "hf_model" not in save_contents(command, f"recipe={recipe}", typed)
    recipe.write_text(f"stage: {stage}\ntrainer: {{checkpoint: {{save_contents: {shards}}}}}\n")
    assert "hf_model" not in save_contents(command, f"recipe={recipe}")
    # config.yaml of a run, given as its recipe, means the same
    for overrides in ([], [typed]):
        config = load_config(command, [f"recipe={tmp_path / 'mine.yaml'}", *overrides])
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        again = save_contents(command, f"recipe={tmp_path / 'config.yaml'}")
        assert again == set(config.trainer.checkpoint.save_contents)


def test_untrained_weights_are_recognized(quickstart: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((quickstart / "model/config.json").read_text())["vocab_size"]
    assert untrained_loss(str(quickstart / "model")) == pytest.approx(math.log(vocabulary))
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 0.1
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, model / "model.safetensors")
    assert untrained_loss(str(model)) is None
    (model / "model.safetensors").write_bytes(b"damaged")
    assert untrained_loss(str(model)) is None
    assert untrained_loss("org/name") is None
