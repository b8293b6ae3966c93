"""Checkpoints and runs from others: none of their code runs, and none of their paths leads elsewhere."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from eval_pipeline.__main__ import main as evaluate
from eval_pipeline.checkpoints import check_export, read_training_run
from eval_pipeline.recipe import config_for_run
from tests.helpers.vlms import TIERS, write_controller, write_model
from verl_ext.checkpoint.inspection import read_retention
from verl_ext.checkpoint.manifest import EXTRA, MODEL, OPTIMIZER, Manifest, shard_name, why_incomplete
from verl_ext.checkpoint.rebuild import copy_small_files, write_weights
from verl_ext.checkpoint.shards import ShardFiles
from verl_ext.controller.vlm import ControlledModel, load_controller
from verl_ext.errors import UserError
from verl_ext.launch.configure import best_export
from verl_ext.model_files import require_no_remote_code
from verl_ext.trainer.model import load_model_config, require_own
from verl_ext.trainer.stages import load_config
from verl_ext.trainer.tokenizer import load_tokenizer

SECRET = "hf_PLANTED0123456789"


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that planted code creates."""
    # bytecode counts as that of a source of the same size and second, such as the planted code of the test before
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "planted"


def write_code(directory: Path, marker: Path, **config: Any) -> Path:
    """Write a model directory with custom code that its configuration names."""
    directory.mkdir(exist_ok=True)
    code = f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\nfrom transformers import LlamaConfig\n"
    code += "class Planted(LlamaConfig): pass\n"  # transformers marks the class itself as custom code
    (directory / "planted.py").write_text(code)
    auto_map = {"AutoConfig": "planted.Planted", "AutoModel": "planted.Planted", "AutoTokenizer": "planted.Planted"}
    content = {"model_type": "planted", "auto_map": auto_map, **config}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("kind", [MODEL, OPTIMIZER, EXTRA])
def test_shards_run_no_code(kind: str, tmp_path: Path, marker: Path) -> None:
    torch.save({"state": {0: Bomb(marker)}}, tmp_path / shard_name(kind, 1, 0))
    with pytest.raises(UserError, match=r"is not loaded, because it names posix.mkdir, which may run code"):
        ShardFiles(tmp_path, kind).content(0)
    assert not marker.exists()
    torch.load(tmp_path / shard_name(kind, 1, 0), weights_only=False)
    assert marker.exists()  # the payload works


def test_shards_saved_by_verl_are_loaded(tmp_path: Path) -> None:
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    groups = [{"betas": OmegaConf.create([0.9, 0.95]), "lr": 1e-3, "params": [0]}]
    states: dict[str, Any] = {EXTRA: {"rng": rng}, OPTIMIZER: {"state": {}, "param_groups": groups}}
    for kind, state in states.items():
        torch.save(state, tmp_path / shard_name(kind, 1, 0))
    loaded = ShardFiles(tmp_path, EXTRA).content(0)["rng"]
    assert (loaded["numpy"][1] == rng["numpy"][1]).all() and loaded["random"] == rng["random"]
    assert list(ShardFiles(tmp_path, OPTIMIZER).content(0)["param_groups"][0]["betas"]) == [0.9, 0.95]


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/config.json", "huggingface/../../x"])
def test_manifest_names_only_files_of_checkpoint(file: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_1"
    checkpoint.mkdir()
    text = Manifest(1, 1, "", {file: {"bytes": 1}}).to_json()
    (checkpoint / "manifest.json").write_text(text)
    assert "which is not in the checkpoint" in (why_incomplete(checkpoint) or "")


def test_index_names_only_files_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("/etc/passwd", "../secret.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UserError, match="not in its directory"):
            check_export(tmp_path)


def test_export_copies_no_file_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"auths": SECRET}))
    source = tmp_path / "global_step_1" / "huggingface"
    source.mkdir(parents=True)
    (source / "tokenizer.json").symlink_to(secret)
    (source / "merges.txt").write_text("a b")
    (source / "vocab.json").symlink_to("merges.txt")
    (tmp_path / "out").mkdir()
    copy_small_files(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"merges.txt", "vocab.json"}
    assert "tokenizer.json, a link that points outside the checkpoint" in capsys.readouterr().err
    (source / "config.json").symlink_to(secret)
    torch.save({"w": torch.zeros(2)}, source.parent / shard_name(MODEL, 1, 0))
    with pytest.raises(UserError, match="is a link that points outside the checkpoint"):
        write_weights(source.parent, tmp_path / "out", "bf16", 1.0, lambda num_bytes: None)


@pytest.mark.parametrize("name", ["/tmp/planted", "../../planted", "global_step_1/../../planted", "planted"])
def test_best_checkpoint_must_belong_to_run(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "project" / "run"
    for place in (run_dir / name / "huggingface", run_dir / "global_step_1"):
        place.mkdir(parents=True, exist_ok=True)
    (run_dir / "best_checkpoint.json").write_text(json.dumps({"checkpoint": name}))
    with pytest.raises(UserError, match="does not name the best checkpoint"):
        best_export(run_dir)


def test_suggested_command_quotes_path(tmp_path: Path) -> None:
    checkpoint = tmp_path / "my run" / "global_step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "best_checkpoint.json").write_text(json.dumps({"checkpoint": checkpoint.name}))
    with pytest.raises(UserError, match=re.escape(f"export '{checkpoint}'`")):
        best_export(checkpoint.parent)


def test_config_of_run_reads_nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "config.yaml").write_text(
        "trainer: {project_name: '${oc.env:HF_TOKEN}', max_ckpt_to_keep: '${oc.env:HF_TOKEN}'}\n"
    )
    for read in (read_training_run, read_retention):
        with pytest.raises(UserError, match="has the interpolation") as refused:
            read(tmp_path)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["planted.yaml", "../../planted", "/tmp/planted", "run/planted"])
def test_config_of_run_names_no_recipe_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "planted.yaml").write_text("engine: {kind: openai, base_url: 'http://elsewhere.example'}\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"eval": {"recipe": name}}))
    with pytest.raises(UserError, match=f"add --recipe {name}"):
        config_for_run(None, [], tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps({"eval": {"recipe": "quickstart"}}))
    assert list(config_for_run(None, [], tmp_path).datasets) == ["quickstart"]


def test_rejects_code_requested_by_model_config(tmp_path: Path, marker: Path) -> None:
    code = write_code(tmp_path / "code", marker)
    detector = {"model_type": "planted", "_name_or_path": str(code)}
    asking = {"model_type": "lightglue", "trust_remote_code": True, "keypoint_detector_config": detector}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(asking))
    config = load_config("sft", [f"model.partial_pretrain={model}"])
    for load in (load_model_config, load_tokenizer):
        with pytest.raises(UserError, match=r"requires custom code \(trust_remote_code"):
            load(config)
    assert not marker.exists()
    AutoConfig.from_pretrained(code, trust_remote_code=True)
    assert marker.exists()  # what the configuration asks for
    nested = {"model_type": "llama", "vision_config": {"_attn_implementation_internal": "someone/kernel"}}
    (model / "config.json").write_text(json.dumps(nested))
    with pytest.raises(UserError, match="requires attention code from the Hub"):
        load_model_config(config)
    require_no_remote_code(str(model), trusted=True)


def test_custom_model_classes_are_not_imported(tmp_path: Path, marker: Path) -> None:
    model = write_code(tmp_path / "model", marker)
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["planted.Planted", None]}}))
    config = load_config("sft", [f"model.partial_pretrain={model}"])
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_model_config(config)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(config)
    assert not marker.exists()


def test_controller_export_cannot_enable_code(tmp_path: Path, marker: Path) -> None:
    export = write_controller(tmp_path / "controller", write_model(tmp_path / "vlm"))
    planted = write_code(tmp_path / "code", marker)
    content = json.loads((export / "config.json").read_text())
    content["vlm"] |= {"path": str(planted), "trust_remote_code": True}
    (export / "config.json").write_text(json.dumps(content))
    _, model = load_controller(export)
    known = {"tier_sizes": TIERS, "trust_remote_code": False}
    assert model == ControlledModel(**{**content["vlm"], **known})
    with pytest.raises(UserError, match="cannot be loaded"):
        model.runner("cpu", torch.float32)
    assert not marker.exists()
    assert load_controller(export, trust_remote_code=True)[1].trust_remote_code and model.tier_sizes == TIERS


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("command", ["calibrate", "importance", "adaptive"])
def test_command_runs_model_code_only_on_request(
    command: str, trusted: bool, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = str(write_code(tmp_path / "code", marker))
    given = ["--questions", str(tmp_path), "--output", str(tmp_path / "out")]
    given += ["--trust-remote-code"] if trusted else []
    with pytest.raises(SystemExit) as left:
        if command == "adaptive":
            export = write_controller(tmp_path / "controller", write_model(tmp_path / "vlm"))
            evaluate(["adaptive", "--checkpoint", str(export), "--vlm", planted, "--no-wandb", *given])
        else:
            module = importlib.import_module(f"verl_ext.controller.{command}")
            monkeypatch.setattr("sys.argv", [command, "--model", planted, "--tier-sizes", "1", "2", *given])
            module.main()
    assert left.value.code == 2 and marker.exists() is trusted


def test_rejects_shared_memory_directory_of_others(tmp_path: Path) -> None:
    own, theirs, link = tmp_path / "own", tmp_path / "theirs", tmp_path / "link"
    require_own(own)
    require_own(own)
    assert own.stat().st_mode & 0o777 == 0o700
    theirs.mkdir()
    theirs.chmod(0o777)
    link.symlink_to(own)
    for directory in (theirs, link):
        with pytest.raises(UserError, match="other users may write into"):
            require_own(directory)
