"""The command line before any rank starts: arguments, imports, checks, and reporting of failed ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from tests.helpers import ROOT
from tests.helpers.checkpoints import save
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.save import add_metrics
from verl_ext.config.run_config import config_digest
from verl_ext.config.schema import as_dict
from verl_ext.errors import UserError
from verl_ext.files import hold_run_lock
from verl_ext.launch.__main__ import launch, parse_arguments
from verl_ext.launch.configure import configure
from verl_ext.launch.outcome import first_failure
from verl_ext.launch.preflight import (
    check_components,
    check_config,
    check_inputs,
    check_run_directory,
    needed_commands,
    prepare_inputs,
)
from verl_ext.launch.run import (
    first_start_and_precision,
    input_digests,
    is_finished,
    lease_inputs,
    may_be_longer,
    print_changes,
)
from verl_ext.launch.show_samples import show_samples
from verl_ext.launch.torchrun import set_rank_environment, torchrun_options
from verl_ext.metrics.recorder import verl_backends
from verl_ext.metrics.run_record import RunRecord
from verl_ext.processes import StopSignals
from verl_ext.trainer.stages import RunConfig, load_config, read_config


def test_parses_process_count_and_overrides() -> None:
    arguments = parse_arguments(["sft", "8", "recipe=x", "optim.lr=1", "~data.val_files", "+a.b=2"])
    assert arguments.num_processes == 8
    assert arguments.overrides == ["recipe=x", "optim.lr=1", "~data.val_files", "+a.b=2"]
    assert parse_arguments(["sft", "--print-config"]).num_processes is None


@pytest.mark.parametrize("words", [["0"], ["two"], ["-1"], ["2", "3"], ["²"], ["٣"], ["9" * 20]])
def test_rejects_other_numbers_of_ranks(words: list[str]) -> None:
    says = f"'{words[-1]}' is neither the number of ranks nor key=value; start with .* such as `bash run_sft.sh 2`$"
    with pytest.raises(UserError, match=says):
        parse_arguments(["sft", *words])


@pytest.mark.parametrize("word", ["--resume", "quickstart"])
def test_rejects_other_arguments(word: str) -> None:
    with pytest.raises(UserError, match=f"{word}.*(; see|\\? See) `bash run_sft.sh --help`"):
        parse_arguments(["sft", "2", word])


@pytest.mark.parametrize("option", [["--show-samples", "3"], ["--show-samples=3"], ["--show-samples"]])
def test_show_samples_is_option_of_sft_only(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="^--show-samples is an option of `bash run_sft.sh` only; look at .*samples.j"):
        parse_arguments(["grpo", "2", *option])
    for stage in ("sft", "grpo"):
        with pytest.raises(SystemExit):
            parse_arguments([stage, "--help"])
        assert ("--show-samples" in capsys.readouterr().out) == (stage == "sft")


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_recipe_of_other_command_names_it(command: str) -> None:
    other = {"sft": "grpo", "grpo": "sft"}[command]
    recipe = f"recipe={ROOT}/recipes/{other}/quickstart.yaml"
    says = f"quickstart.yaml is a recipe for the stage {other}; start it with `bash run_{other}.sh NUM_RANKS {recipe}`"
    with pytest.raises(UserError, match=says):
        load_config(command, [recipe])


def test_recipe_with_key_of_other_stage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {max_prompt_length: 8}\n")
    says = f"{path} sets data.max_prompt_length, which has no effect in the stage sft; remove it"
    with pytest.raises(UserError, match=says):
        load_config("sft", [f"recipe={path}"])
    path.write_text("stage: rlhf\n")
    with pytest.raises(UserError, match=f"{path} has the stage 'rlhf'; the stages are sft, vlm_sft, grpo, budget"):
        load_config("sft", [f"recipe={path}"])
    path.write_text("stage: [sft]\n")
    with pytest.raises(UserError, match=rf"{path} has the stage \['sft'\]; the stages are sft"):
        read_config(path)


@pytest.mark.parametrize(("word", "heavy"), [("--help", "omegaconf"), ("--print-config", "torch")])
def test_help_and_print_config_import_no_heavy_packages(word: str, heavy: str) -> None:
    code = (
        "import sys\nfrom verl_ext.launch.__main__ import main\n"
        f"sys.argv = ['launch', 'sft', {word!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"sys.exit({heavy!r} in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "quickstart" in result.stdout


def test_only_several_nodes_meet_over_the_network() -> None:
    config = load_config("sft", ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"])
    assert {"--nproc-per-node=8", "--nnodes=2", "--rdzv-backend=cluster"} == set(torchrun_options(config))
    config.trainer.nnodes = 1
    assert "--rdzv-backend=loopback" in torchrun_options(config)  # a free port, so that two runs share a machine


@pytest.mark.parametrize(
    ("command", "environment", "allocator"),
    [
        ("sft", {"CUDA_VISIBLE_DEVICES": "0"}, "expandable_segments:True"),
        ("sft", {"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("sft", {"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("sft", {"CUDA_VISIBLE_DEVICES": ""}, None),
        ("grpo", {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_sft_on_gpus_has_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, command: str, environment: dict[str, str], allocator: str | None
) -> None:
    config = load_config(command, [])
    monkeypatch.setattr(os, "environ", environment)
    set_rank_environment(config)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == allocator


def test_run_lock_rejects_second_launch(tmp_path: Path) -> None:
    with hold_run_lock(tmp_path):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on .*; wait for it, or stop it$"):
            with hold_run_lock(tmp_path):
                pass
    with hold_run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / "run.lock").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [("NNODES", "0"), ("NNODES", "two"), ("NODE_RANK", "1"), ("NODE_RANK", "x"), ("MASTER_PORT", "x")],
)
def test_rejects_bad_node_environment(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name} is '{value}'"):
        configure(parse_arguments(["sft", "2"]))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sft"], "the number of ranks is missing; for example: `bash run_sft.sh 2`"),
        (["grpo"], "bash run_grpo.sh 2"),
        (["sft", "2", "trainer.nnodes=2"], "trainer.nnodes=2 contradicts NNODES"),
        (["sft", "2", "trainer.n_gpus_per_node=4"], "trainer.n_gpus_per_node=4 contradicts the first argument"),
    ],
)
def test_rejects_misplaced_or_repeated_number_of_ranks(words: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        configure(parse_arguments(words))


@dataclass
class FakeFailure:
    exitcode: int
    message: str
    timestamp: int
    pid: int = 7
    error_file: str = "error.json"

    def signal_name(self) -> str:
        return "SIGKILL"


def test_rank_with_user_error_is_reported_as_cause() -> None:
    failures = {0: FakeFailure(1, "connection closed", 1), 1: FakeFailure(2, "the file is empty", 2)}
    failure = first_failure(failures)
    assert (failure.message, failure.is_user_error) == ("the file is empty", True)
    no_reply = FakeFailure(2, "To enable traceback see: https://pytorch.org/", 2, error_file="<N/A>")
    assert first_failure({1: no_reply}).message == "rank 1 rejected its input; see its message above"
    transient = first_failure({0: FakeFailure(1, "the file cannot be read", 1)})
    assert (transient.message, transient.is_user_error) == ("the file cannot be read", False)
    killed = first_failure({1: FakeFailure(-9, "", 5), 0: FakeFailure(1, "", 6)})
    assert (killed.message, killed.is_user_error) == ("rank 1 (process 7) was killed by SIGKILL", False)


@pytest.mark.parametrize("seconds", [(5, 5), (6, 5)])
def test_killed_rank_is_reported_as_cause_before_failed_peer(seconds: tuple[int, int]) -> None:
    failures = {0: FakeFailure(1, "connection closed", seconds[1]), 1: FakeFailure(-9, "", seconds[0])}
    assert first_failure(failures).message == "rank 1 (process 7) was killed by SIGKILL"


MISTAKES = {
    "trainer.logger=[console,wanbd]": "did you mean 'wandb'",
    "trainer.device=npu": "torch_npu",
    "optim.optimizer=adamw": "did you mean 'AdamW'",
    "optim.optimizer_impl=torch.optm": "'torch.optm', which cannot be imported",
    "optim.override_optimizer_config={epz: 1}": "'epz'",
    "optim.override_optimizer_config={eps: -1}": "Invalid epsilon value",
    "optim.override_optimizer_config={fused: true, foreach: true}": "rejects its arguments .*cannot be `True` together",
    "data.chat_template=nowhere.jinja": "nowhere.jinja, which does not exist",
    "data.chat_template='{% generation %}'": "line 1: .*endgeneration",
    "data.max_length=9223372036854775808": "data.max_length is 9223372036854775808; .*at most 2147483647",
    "trainer.total_training_steps=9223372036854775808": "at most 2147483647",
    "data.train_max_samples=9223372036854775808": "at most 2147483647",
    "data.custom_cls.path=nowhere.py": "data.custom_cls.path=nowhere.py does not exist",
    "model.external_lib=nowhere": "'nowhere', which is not installed",
    "model.use_liger=true": "package liger-kernel",
    "model.attn_implementation=flash_attention_2": "does not support fp32; set model.mixed_precision=bf16",
    "model={attn_implementation: flash_attention_2, mixed_precision: bf16}": "package flash-attn",
    "eval.recipe=humanevl": "did you mean eval.recipe=humaneval",
    "trainer.resume_from_path=/nowhere/global_step_2": "not a global_step_N directory",
}
"""Overrides of a launch, and what its refusal says."""


def check_all(config: RunConfig) -> None:
    check_config(config)
    check_inputs(config)


def launch_arguments(quickstart: Path, run_dir: Path) -> list[str]:
    """The arguments of a valid SFT launch."""
    files = [f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"]
    model = f"model.partial_pretrain={quickstart}/model"
    return ["sft", "2", "prepare=[]", f"trainer.default_local_dir={run_dir}", model, *files]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_mistakes_before_preparing_or_writing(
    mistake: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("liger_kernel", "flash_attn", "torch_npu"))
    with pytest.raises(UserError, match=MISTAKES[mistake]):
        check_config(configure(parse_arguments([*launch_arguments(quickstart, tmp_path / "run"), mistake])))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "mistake", "says"),
    [
        ("sft", "optim.lr=-1", "optim.lr is -1"),
        ("sft", "trainer.total_epochs=0", "trainer.total_epochs is 0"),
        ("sft", "model.partial_pretrain=/nowhere", "no model at /nowhere"),
        ("sft", "data.train_files=/nowhere.parquet", "data.train_files names /nowhere.parquet"),
        ("grpo", "optim.lr=-1", "optim.lr is -1"),
        ("grpo", "data.val_files=null", "data.val_files is not set"),
        ("grpo", "model.partial_pretrain=/nowhere", "no model at /nowhere"),
        ("grpo", "data.max_response_length=100000", "more than the model's context"),
        ("grpo", "reward.packages=[numpyy]", "'numpyy', which is not installed"),
        ("grpo", "reward.isolation=docker", "must be auto, bwrap"),
    ],
)
def test_rejects_bad_values_before_preparing_data(
    stage: str, mistake: str, says: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's data do not exist yet; the model does."""
    monkeypatch.setattr("verl_ext.data.prepare.recipe_commands.prepare", lambda words: pytest.fail(f"prepared {words}"))
    data = [f"data.train_files={tmp_path}/data/train.parquet", f"data.val_files={tmp_path}/data/val.parquet"]
    words = [*data, f"prepare=['quickstart --output {tmp_path}/data']", f"trainer.default_local_dir={tmp_path}/run"]
    arguments = parse_arguments([stage, "2", *words, f"model.partial_pretrain={quickstart}/model", mistake])
    with pytest.raises(UserError, match=says):
        launch(arguments, StopSignals())
    assert list(tmp_path.iterdir()) == []


NULLABLE = {
    "actor.ppo_mini_batch_size=abc": "gsm8k",
    "data.max_tokens_per_gpu=abc": "sft",
    "optim.override_optimizer_config=abc": "sft",
    "optim.override_optimizer_config=[1,2]": "grpo",
    "trainer.resume_from_path=7": "sft",
    "trainer.resume_from_path=[a,b]": "grpo",
    "data.custom_cls.path=7": "sft",
    "data.custom_cls.path=[a,b]": "sft",
    "data.val_files=[1,2]": "budget_controller",
    "actor.loss_scale_factor=abc": "grpo",
    "actor.loss_scale_factor=[1,2]": "grpo",
    "reward.num_workers=abc": "grpo",
    "model.sft_run=7": "grpo",
    "model.adapter=7": "budget_controller",
    "actor.loss_scale_factor=true": "grpo",
    "reward.num_workers=1.5": "grpo",
    "reward.num_workers=true": "grpo",
    "data.token_cache=[a,b]": "sft",
    "data.custom_cls.name=[a,b]": "sft",
    "data.prompt_dict_keys=true": "sft",
    "data.response_dict_keys=true": "sft",
    "model.lora_adapter_path=[a,b]": "sft",
    "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=true": "sft",
    "controller.init_from=[a,b]": "budget_controller",
    "controller.importance_file=[a,b]": "budget_controller",
    "latency.file=true": "budget_controller",
}
"""A wrong value, and a stage or recipe that has the key."""


@pytest.mark.parametrize("mistake", NULLABLE)
def test_rejects_wrong_value_of_nullable_key(mistake: str, quickstart: Path, tmp_path: Path) -> None:
    recipe = NULLABLE[mistake]
    stage = "sft" if recipe == "sft" else "grpo"
    model = f"model.partial_pretrain={quickstart}/model"
    words = [stage, "2", "prepare=[]", f"trainer.default_local_dir={tmp_path}/run"]
    words += [] if mistake.startswith("model.sft_run") else [model]
    words += [] if recipe in ("sft", "grpo") else [f"recipe={recipe}"]
    key = re.escape(mistake.partition("=")[0])
    with pytest.raises(UserError, match=key):
        prepare_inputs(configure(parse_arguments([*words, mistake])))


def test_prepared_model_is_checked_after_preparation(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and data are to be prepared, but no model appears."""
    made: list[Sequence[str]] = []
    monkeypatch.setattr("verl_ext.data.prepare.recipe_commands.prepare", made.append)
    data = [f"data.train_files={tmp_path}/data/train.parquet", f"data.val_files={tmp_path}/data/val.parquet"]
    words = [*data, f"model.partial_pretrain={tmp_path}/data/model", f"prepare=['quickstart --output {tmp_path}/data']"]
    words.append(f"trainer.default_local_dir={tmp_path}/run")
    with pytest.raises(UserError, match=f"no model at {tmp_path}/data/model"):
        launch(parse_arguments(["sft", "2", *words]), StopSignals())
    assert made == [["quickstart", "--output", f"{tmp_path}/data"]]


def test_rejects_directory_in_place_of_file(quickstart: Path, tmp_path: Path) -> None:
    config = configure(parse_arguments(launch_arguments(quickstart, tmp_path / "run")))
    for name, other in {"config.yaml": "a file", "sft_history.csv": "a file", "trace": "a directory"}.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if other == "a file" else path.touch()
        with pytest.raises(UserError, match=f"{path} is .*{other.removeprefix('a ')}"):
            check_config(config)
        path.rmdir() if other == "a file" else path.unlink()
    check_config(config)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "name, content, names",
    [
        ("config.json", "[1, 2]", "not a JSON object"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("model.safetensors.index.json", '{"weight_map": []}', "does not map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "does not map"),
    ],
)
def test_rejects_model_with_invalid_files(
    name: str, content: str, names: str, trusted: bool, quickstart: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))
    (model / name).write_text(content)
    words = [*launch_arguments(quickstart, tmp_path / "run"), f"model.partial_pretrain={model}"]
    config = configure(parse_arguments([*words, f"model.trust_remote_code={trusted}"]))
    with pytest.raises(UserError, match=f"{model}/{name}.* {names}"):
        check_inputs(config)


def test_rejects_prepare_command_with_unclosed_quote(quickstart: Path, tmp_path: Path) -> None:
    words = [*launch_arguments(quickstart, tmp_path / "run"), "prepare=['quickstart --output \"data']"]
    with pytest.raises(UserError, match="quickstart --output .* is malformed .*quotation"):
        needed_commands(configure(parse_arguments(words)))


def without(*modules: str) -> Callable[..., Any]:
    """`importlib.util.find_spec` of a Python that lacks some modules."""
    find = importlib.util.find_spec
    return lambda name, *rest: None if name in modules else find(name, *rest)


def test_checks_write_nothing(quickstart: Path, tmp_path: Path) -> None:
    words = launch_arguments(quickstart, tmp_path / "deep/run")
    template = "data.chat_template='{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}'"
    optimizer = ["optim.optimizer=SGD", "optim.override_optimizer_config={momentum: 0.9}"]
    check_all(configure(parse_arguments([*words, template, *optimizer, "trainer.logger=[console,file,mlflow]"])))
    assert list(tmp_path.iterdir()) == []


def test_length_beyond_context_is_named(quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, is_told in ((1024, False), (1025, True)):
        words = [*launch_arguments(quickstart, tmp_path / "run"), f"data.max_length={length}"]
        check_all(configure(parse_arguments(words)))
        told = f"warning: data.max_length={length} exceeds the model's context of 1024 tokens"
        assert (told in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"tokenizer_config.json": {}}, "has no chat template"),
        ({"tokenizer_config.json": []}, "is not a JSON object"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "model-1.safetensors"}}}, "lacks model-1.safetensors"),
        ({"config.json": {"trust_remote_code": True}}, "requires custom code"),
    ],
)
def test_model_is_checked_before_torchrun(damage: dict[str, Any], says: str, quickstart: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))
    for name, content in damage.items():
        (model / name).write_text(json.dumps(content))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    words = [*launch_arguments(quickstart, tmp_path / "run"), f"model.partial_pretrain={model}"]
    with pytest.raises(UserError, match=says):
        check_all(configure(parse_arguments(words)))


def test_rejects_unwritable_run_directory(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a directory"):
        check_run_directory(tmp_path / "file/run")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=f"no permission to write into {tmp_path}"):
        check_run_directory(tmp_path / "run")


@pytest.mark.parametrize(("ranks", "visible"), [(2, "0"), (8, "0,1,2,3")])
def test_rejects_more_ranks_than_gpus(ranks: int, visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    config = configure(parse_arguments(["sft", str(ranks)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a torch for CPUs does not see them
    check_components(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        UserError, match=f"{ranks} ranks need {ranks} GPUs, but only {len(visible.split(','))} can be used"
    ):
        check_components(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks))))
    check_components(config)


def test_rank_without_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES may list more GPUs than the machine has."""
    import torch

    from verl_ext.distributed import init_process_group

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="torch finds only 2 devices on this node, .* start at most 2 ranks per node"):
        init_process_group("cuda")


def test_logger_backends_match_verl() -> None:
    from verl.utils.tracking import Tracking

    assert verl_backends() == Tracking.supported_backend


@pytest.mark.parametrize(
    ("changes", "total_steps", "longer"),
    [
        ({"optim.lr": (0.5, 1.0)}, None, False),
        ({"trainer.total_epochs": (2, 3)}, None, True),
        ({"trainer.total_epochs": (2, 1)}, None, False),
        ({"trainer.total_epochs": ("damaged", 1)}, None, True),
        ({"data.train_batch_size": (4, 8)}, None, False),
        ({"data.train_files": ("a.parquet", "b.parquet")}, None, False),
        ({"trainer.total_training_steps": (10, None), "data.train_batch_size": (4, 8)}, None, True),
        ({"trainer.total_training_steps": (None, 11)}, 11, True),
        ({"trainer.total_training_steps": (None, 10), "trainer.total_epochs": (2, 9)}, 10, False),
    ],
)
def test_detects_settings_that_add_steps_to_finished_run(
    changes: dict[str, tuple[Any, Any]], total_steps: int | None, longer: bool
) -> None:
    assert may_be_longer(changes, total_steps, steps_done=10) == longer


def test_resumed_run_names_changed_settings(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def printed(*words: str) -> str:
        capsys.readouterr()
        print_changes(configure(parse_arguments([*launch_arguments(quickstart, run_dir), *words])))
        return capsys.readouterr().out

    assert printed("optim.lr=0.5") == ""
    former = configure(parse_arguments([*launch_arguments(quickstart, run_dir), "optim.lr=0.25"]))
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(json.dumps(as_dict(former)))
    assert printed("optim.lr=0.5") == "", "it starts at step 0"
    save(run_dir, 2)
    assert printed("optim.lr=0.25", "trainer.preemption.grace_s=9") == ""
    assert printed("optim.lr=0.5") == "Resuming with changed settings: optim.lr: 0.25 -> 0.5.\n"
    relative = (
        f"trainer.default_local_dir={os.path.relpath(run_dir)}",
        f"trainer.resume_from_path={run_dir}/global_step_2",
    )
    assert printed("optim.lr=0.5", *relative) == "Resuming with changed settings: optim.lr: 0.25 -> 0.5.\n"
    others = "optim.clip_grad=2", "data.train_batch_size=2", "optim.weight_decay=0.5"
    assert printed("optim.lr=0.5", "trainer.experiment_name=renamed", *others) == (
        "Resuming with changed settings:\n  data.train_batch_size: 32 -> 2\n  optim.clip_grad: 1.0 -> 2\n"
        "  optim.lr: 0.25 -> 0.5\n  optim.weight_decay: 0.01 -> 0.5\n"
    )
    (run_dir / "config.yaml").write_text("[damaged")
    assert printed("optim.lr=0.5") == ""
    (run_dir / "config.yaml").unlink()
    assert printed("optim.lr=0.5") == ""


def test_resumed_run_names_changed_reward_and_validation_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of earlier versions have no digests, and validations are only compared if there were some."""
    run_dir, reward, val = tmp_path / "run", tmp_path / "reward.py", tmp_path / "val.parquet"
    reward.write_text("def f(**kwargs):\n    return 1.0\n")
    val.write_bytes(b"one")
    config = load_config(
        "grpo", [f"reward.functions=['{reward}:f*2']", f"data.val_files={val}", f"trainer.default_local_dir={run_dir}"]
    )

    def printed() -> tuple[str, str]:
        capsys.readouterr()
        print_changes(config)
        said = capsys.readouterr()
        return said.out, said.err

    checkpoint = save(run_dir, 2)
    (run_dir / "config.yaml").write_text(json.dumps(as_dict(config)))
    record = RunRecord(run_dir)
    record.mark_waiting(launch={})
    record.start_attempt(first_step=0, world_size=1, total_steps=9)
    record.end_attempt("stopped", 2, "stopped")
    reward.write_text("def f(**kwargs):\n    return 2.0\n")
    assert printed() == ("", "")

    record.mark_waiting(launch={"input_files": input_digests(config)})
    record.start_attempt(first_step=2, world_size=1, total_steps=9)
    record.end_attempt("stopped", 2, "stopped")
    assert printed() == ("", "")
    reward.write_text("def f(**kwargs):\n    return 3.0\n")
    record.mark_waiting(launch={"input_files": input_digests(config)})
    record.end_if_running("failed", "it failed before training")
    assert printed() == (f"Resuming with changed settings: the content of {reward}.\n", "")

    add_metrics(checkpoint, {"eval/reward_total_mean": 0.5})
    val.write_bytes(b"two")
    out, err = printed()
    assert out == f"Resuming with changed settings: the content of {reward}, the content of {val}.\n"
    assert "eval/reward_total_mean is not comparable before and after global_step_2" in err


def test_digests_are_of_data_that_validations_use(tmp_path: Path) -> None:
    files = [tmp_path / "train.parquet", tmp_path / "val.parquet"]
    for path in files:
        path.write_bytes(path.name.encode())
    words = [f"data.{path.stem}_files={path}" for path in files]
    for split, path in zip(("train", "test"), files):
        config = load_config("grpo", [*words, f"data.eval_split={split}", "reward.functions=[reward_format]"])
        assert list(input_digests(config)) == [str(path)]


def test_resumed_run_keeps_first_start_of_its_checkpoint(quickstart: Path, tmp_path: Path) -> None:
    """A run that starts at step 0 gets the current time, even if the directory has a record of another run."""
    former, run_dir = datetime(2026, 7, 4, 9, 30), tmp_path / "run"

    def started(*words: str) -> datetime:
        config = configure(parse_arguments([*launch_arguments(quickstart, run_dir), *words]))
        return first_start_and_precision(config)[0]

    RunRecord(tmp_path / "other").mark_waiting(first_start=former.isoformat())
    RunRecord(run_dir).mark_waiting(first_start=former.isoformat())
    assert datetime.now() - started() < timedelta(minutes=1)
    save(run_dir, 2)
    assert started() == former
    assert datetime.now() - started("trainer.resume_mode=disable") < timedelta(minutes=1)
    (run_dir / "run.json").write_text("damaged")
    assert datetime.now() - started() < timedelta(minutes=1)
    path = f"trainer.resume_from_path={save(tmp_path / 'other', 4)}"
    assert started("trainer.resume_mode=resume_path", path) == former


def test_resumed_run_keeps_precision_of_its_checkpoint(quickstart: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def recorded(*words: str) -> str | None:
        config = configure(parse_arguments([*launch_arguments(quickstart, run_dir), *words]))
        return first_start_and_precision(config)[1]

    RunRecord(run_dir).mark_waiting(precision="bf16")
    assert recorded() is None, "a run that starts at step 0 chooses again"
    save(run_dir, 2)
    assert recorded() == "bf16" and recorded("trainer.resume_mode=disable") is None
    RunRecord(run_dir).mark_waiting(precision=None)
    assert recorded() == "fp32", "a record without a dtype"
    (run_dir / "run.json").write_text("damaged")
    assert recorded() == "fp32"


def test_finished_run_of_earlier_release_may_have_extra_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe=quickstart", f"trainer.default_local_dir={tmp_path}"]
    content = as_dict(load_config("grpo", words))
    content["data"] |= {"truncation": "error", "multiturn": {"enable": False}}
    content |= {"use_remove_padding": False, "ulysses_sequence_parallel_size": 1}
    (tmp_path / "config.yaml").write_text(json.dumps(content))  # which is YAML too
    monkeypatch.setattr("verl_ext.launch.run.has_finished", lambda config, record: True)
    record = Mock(read=lambda: {"config_digest": config_digest(content)})
    assert is_finished(load_config("grpo", words), record)
    assert not is_finished(load_config("grpo", [*words, "optim.lr=1"]), record)


def test_show_samples_marks_tokens_in_loss(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("user", "Name \N{SNOWMAN}"), ("assistant", "r\N{LATIN SMALL LETTER E WITH ACUTE}d")]
    chat = [{"role": role, "content": content} for role, content in [*turns, *turns]]
    pd.DataFrame({"messages": [chat]}).to_parquet(tmp_path / "chats.parquet")
    words = launch_arguments(quickstart, tmp_path / "run")
    data = [f"data.train_files={tmp_path / 'chats.parquet'}", f"data.token_cache={tmp_path}"]
    assert launch(parse_arguments([*words, *data, "--show-samples", "3"]), StopSignals()) == 0
    header, *lines = capsys.readouterr().out.partition("--- sample 0: ")[2].splitlines()
    turn = "<|im_start|>user\nName \N{SNOWMAN}<|im_end|>\n<|im_start|>assistant\n[[r\xe9d<|im_end|>]]\n"
    assert "\n".join(lines).strip() == (turn + turn).strip()
    assert header.endswith(" in the loss") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("saved", r"the directory .*saved; .*'data.train_files=\[.*/saved/a b.parquet,.*/saved/b.parquet\]'"),
        ("saved/*.parquet", r"which is not a file; .*'data.train_files=\[.*/saved/a b.parquet,.*/saved/b.parquet\]'"),
        ("saved/b*.parquet", r"such as data.train_files=[^\[]*/saved/b.parquet$"),
        ("saved/*.csv", r"no data file .*\*.csv; list the files"),
        ("pairs.parquet", r"no column 'messages' .*columns are ask, say; set data.*=false, data.prompt_key"),
    ],
)
def test_show_samples_checks_data_like_training(name: str, says: str, quickstart: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for each in ("saved/a b.parquet", "saved/b.parquet", "pairs.parquet"):
        pd.DataFrame({"ask": ["q"] * 64, "say": ["a"] * 64}).to_parquet(tmp_path / each)
    words = [*launch_arguments(quickstart, tmp_path / "run"), f"data.train_files={tmp_path / name}"]
    for option in ([], ["--show-samples", "1"]):
        with pytest.raises(UserError, match=says):
            launch(parse_arguments([*words, *option]), StopSignals())


FLAGLESS_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_show_samples_warns_of_template(quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flagless.jinja").write_text(FLAGLESS_TEMPLATE)
    words = [*launch_arguments(quickstart, tmp_path / "run"), f"data.token_cache={tmp_path}", "--show-samples", "1"]
    assert launch(parse_arguments(words), StopSignals()) == 0
    assert "warning" not in capsys.readouterr().err
    launch(parse_arguments([*words, f"data.chat_template={tmp_path / 'flagless.jinja'}"]), StopSignals())
    said = capsys.readouterr().err
    assert "ignores add_generation_prompt, so '<|im_start|>assistant:' before each answer" in said
    assert said.count("warning: no turn ends with a stop token of the model") == 1
    launch(parse_arguments([*words, "data.max_length=9", "data.truncation=left"]), StopSignals())
    assert "1 of 1 samples of" in capsys.readouterr().err


def test_show_samples_rejects_stage_without_chats() -> None:
    with pytest.raises(UserError, match="--show-samples shows chats, but the recipe's stage is vlm_sft; omit"):
        show_samples(load_config("sft", ["recipe=budget_vlm"]), 1)


@pytest.mark.parametrize(
    ("stage", "key", "folder"),
    [
        ("sft", "trainer.resume_from_path", ""),
        ("sft", "model.partial_pretrain", "huggingface"),
        ("sft", "model.lora_adapter_path", "lora_adapter"),
        ("grpo", "model.partial_pretrain", "huggingface"),
        ("grpo", "controller.init_from", ""),
    ],
)
def test_checkpoint_that_run_starts_from_is_leased(
    stage: str, key: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path / "other", 5)
    recipe = ["recipe=budget_controller"] if key.startswith("controller.") else []
    words = [f"trainer.default_local_dir={tmp_path / 'run'}", f"{key}={checkpoint / folder}"]
    config = load_config(stage, [*recipe, *words])
    with lease_inputs(config):
        assert lease_holders(checkpoint)
    assert not lease_holders(checkpoint)
    monkeypatch.setattr("verl_ext.launch.run.hold_lease", Mock(side_effect=FileNotFoundError))
    with pytest.raises(UserError, match=f"{checkpoint} has just been removed"), lease_inputs(config):
        pass


def test_own_checkpoint_to_resume_from_is_not_leased(tmp_path: Path) -> None:
    """The run's own rotation removes it when it is no longer needed."""
    checkpoint = save(tmp_path, 5)
    for words in ([], [f"trainer.resume_from_path={checkpoint}"]):
        with lease_inputs(load_config("sft", [f"trainer.default_local_dir={tmp_path}", *words])):
            assert not lease_holders(checkpoint)
