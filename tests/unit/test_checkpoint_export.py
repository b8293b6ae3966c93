"""When a save writes an export, and exports rebuilt later from the shards."""

from __future__ import annotations

import errno
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from verl.utils.torch_dtypes import PrecisionType

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint import lease
from verl_ext.checkpoint.config import ExportConfig
from verl_ext.checkpoint.manifest import ADAPTER, EXPORT, OURS, Manifest, damaged_files, read_complete
from verl_ext.checkpoint.rebuild import evaluation_command, export, export_dtype_of, write_deferred_export
from verl_ext.distributed import to_full
from verl_ext.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")
EVERYTHING = "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
SHARDS = "trainer.checkpoint.save_contents=[model,optimizer,extra]"


def test_export_from_shards_merges_adapters(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, SHARDS, "model.lora_rank=4", "optim.lr=1e-2"))
    for _, batch in zip(range(2), trainer.batches(), strict=False):
        trainer.training_step(batch)
    trainer.save_checkpoint(2)
    assert not list(tmp_path.glob("global_step_2/huggingface/*.safetensors"))
    target = tmp_path / "model"
    options = {"run_dir": tmp_path / "global_step_2", "step": None, "output": target}
    assert export(Namespace(**options, dtype="fp32", max_shard_gib=1.0)) == 0
    assert f"eval_pipeline/run.sh run --checkpoint {target}\n" in capsys.readouterr().out
    merged, base = load_file(target / "model.safetensors"), load_file(quickstart / "model/model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name].float())}
    assert any("q_proj.weight" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)


def test_checkpoint_has_adapters_for_peft_and_next_run(quickstart: Path, tmp_path: Path) -> None:
    words = (
        EVERYTHING,
        "model.lora_rank=4",
        "model.target_modules=[q_proj,v_proj]",
        "trainer.checkpoint.export.dtype=fp32",
    )
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", *words, "optim.lr=1e-2"))
    for _, batch in zip(range(2), trainer.batches(), strict=False):
        trainer.training_step(batch)
    trainer.save_checkpoint(2)
    trainer.checkpoint_manager.wait()
    checkpoint = tmp_path / "run/global_step_2"
    base = AutoModelForCausalLM.from_pretrained(quickstart / "model", dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, checkpoint / ADAPTER)
    merged, exported = model.merge_and_unload().state_dict(), load_file(checkpoint / EXPORT / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in exported.items())
    words = (f"model.lora_adapter_path={checkpoint / ADAPTER}", SHARDS)
    next_run = make_trainer(small_config(quickstart, tmp_path / "next", *words))
    state = trainer.model.state_dict()
    assert all(torch.equal(to_full(state[name]), to_full(own)) for name, own in next_run.model.state_dict().items())
    (checkpoint / ADAPTER / "adapter_model.safetensors").unlink()
    assert read_complete(checkpoint).deferred == ()


@pytest.mark.parametrize(
    ("config", "folder", "expected"),
    [
        ({"model_type": "budget_controller", "vlm": {}}, "huggingface", "adaptive --checkpoint {}"),
        ({"model_type": "budget_controller", "vlm": {}}, "model", "adaptive --checkpoint {} --questions FOLDER"),
        ({"vision_config": {}}, "model", None),
        ({}, "model", "run --checkpoint {}"),
    ],
)
def test_export_suggests_evaluation_of_its_model(
    config: dict[str, Any], folder: str, expected: str | None, tmp_path: Path
) -> None:
    (export := tmp_path / folder).mkdir()
    (export / "config.json").write_text(json.dumps(config))
    words = [] if expected is None else ["bash", "eval_pipeline/run.sh", *expected.format(export).split()]
    assert evaluation_command(export) == words


def remove_export(export: Path) -> None:
    shutil.rmtree(export)


def cut_weights(export: Path) -> None:
    os.truncate(export / "model.safetensors", 1000)


def remove_tokenizer(export: Path) -> None:
    (export / "tokenizer.json").unlink()


def cut_tokenizer(export: Path) -> None:
    os.truncate(export / "tokenizer.json", 100)


@pytest.mark.parametrize("damage", [remove_export, cut_weights, remove_tokenizer])
def test_resumed_run_writes_damaged_export_again(
    damage: Callable[[Path], None], quickstart: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The shards contain everything to resume from, and the export can be derived from them."""
    config = small_config(quickstart, tmp_path, EVERYTHING)
    trainer = make_trainer(config)
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    checkpoint = tmp_path / "global_step_1"
    before, manifest = contents(checkpoint / EXPORT), Manifest.read(checkpoint)
    damage(checkpoint / EXPORT)
    assert read_complete(checkpoint).deferred == (EXPORT,)
    resumed = make_trainer(config)
    assert resumed.global_step == 1
    assert "Writing global_step_1/huggingface/, which is damaged" in capfd.readouterr().out
    assert contents(checkpoint / EXPORT) == before
    assert read_complete(checkpoint) == Manifest.read(checkpoint) == manifest and not damaged_files(checkpoint)


def test_skipped_export_keeps_configuration_of_its_save(quickstart: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, EVERYTHING))
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.defers_export = True
    trainer.save_checkpoint(2)
    trainer.checkpoint_manager.wait()
    exports = [tmp_path / f"global_step_{step}" / EXPORT for step in (1, 2)]
    write_deferred_export(exports[1].parent, ExportConfig(), {"config.json": b"{}"})
    assert contents(exports[0]) == contents(exports[1])


@pytest.mark.parametrize("damage", [remove_export, remove_tokenizer, cut_tokenizer])
def test_lost_files_of_export_are_taken_from_other_checkpoint(
    damage: Callable[[Path], None], quickstart: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, EVERYTHING))
    for step, batch in zip((1, 2), trainer.batches(), strict=False):
        trainer.training_step(batch)
        trainer.save_checkpoint(step)
    trainer.checkpoint_manager.wait()
    checkpoint = tmp_path / "global_step_2"
    before = contents(checkpoint / EXPORT)
    damage(checkpoint / EXPORT)
    options: dict[str, Any] = {"step": None, "dtype": None, "max_shard_gib": 1.0}
    assert export(Namespace(run_dir=tmp_path, output=None, **options)) == 0
    assert contents(checkpoint / EXPORT) == before and not damaged_files(checkpoint)
    damage(checkpoint / EXPORT)
    assert export(Namespace(run_dir=tmp_path, output=tmp_path / "model", **options)) == 0
    assert contents(tmp_path / "model") == before


def test_lost_tokenizer_of_only_checkpoint_is_named(
    quickstart: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, EVERYTHING))
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    checkpoint = tmp_path / "global_step_1"
    tokenizer, damaged = checkpoint / EXPORT / "tokenizer.json", checkpoint / EXPORT / "tokenizer_config.json"
    content = tokenizer.read_bytes()
    remove_tokenizer(checkpoint / EXPORT)
    arguments = Namespace(run_dir=tmp_path, step=None, output=None, dtype=None, max_shard_gib=1.0)
    with pytest.raises(UserError, match="tokenizer.json is missing.*; copy it there from the model"):
        export(arguments)
    tokenizer.write_bytes(content)
    damaged.write_text("{}")
    assert export(arguments) == 0
    assert "tokenizer_config.json has 2 bytes instead of" in capfd.readouterr().err
    assert damaged.read_text() == "{}" and not damaged_files(checkpoint) and not read_complete(checkpoint).deferred


def contents(directory: Path) -> dict[str, bytes]:
    """The content of each file, by relative path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_export_has_all_model_files(quickstart: Path, tmp_path: Path) -> None:
    make_trainer(small_config(quickstart, tmp_path, EVERYTHING)).save_checkpoint(1)
    export, model = tmp_path / "global_step_1/huggingface", quickstart / "model"
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in export.iterdir()} >= names >= {"vocab.json", "merges.txt", "special_tokens_map.json"}
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json"):
        assert (export / name).read_bytes() == (model / name).read_bytes(), name
    config = json.loads((export / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_export_interval_is_respected(quickstart: Path, tmp_path: Path) -> None:
    overrides = (EVERYTHING, "trainer.save_freq=1", "trainer.checkpoint.export.every=2")
    trainer = make_trainer(
        small_config(quickstart, tmp_path, *overrides, "trainer.checkpoint.export.max_shard_gib=0.001")
    )
    for step in (1, 2):
        trainer.save_checkpoint(step)
    with_weights = {path.parents[1].name for path in tmp_path.glob("*/huggingface/*.safetensors")}
    assert with_weights == {"global_step_2"}
    assert (tmp_path / "global_step_1/huggingface/tokenizer.json").exists()
    assert len(list((tmp_path / "global_step_2/huggingface").glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")])
def test_later_export_uses_dtype_of_run(
    dtype: str, expected: str, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto`, the default of GRPO, is the dtype that training computes in: fp32 on a CPU."""
    setting = f"trainer.checkpoint.export.dtype={dtype}"
    make_trainer(small_config(quickstart, tmp_path, SHARDS, setting, "model.mixed_precision=fp32")).save_checkpoint(1)
    target, options = tmp_path / "model", {"step": None, "max_shard_gib": 1.0}
    assert export(Namespace(**options, run_dir=tmp_path, output=target, dtype=None)) == 0
    assert f"{expected}\n" in capsys.readouterr().out
    stored = {PrecisionType.to_str(tensor.dtype) for tensor in load_file(target / "model.safetensors").values()}
    named = json.loads((target / "config.json").read_text())["dtype"]
    assert stored == {expected} and PrecisionType.to_dtype(expected) == getattr(torch, named)


def test_export_names_newer_damaged_checkpoint(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, SHARDS))
    for step in (1, 2):
        trainer.save_checkpoint(step)
    shard = tmp_path / "global_step_2/model_world_size_1_rank_0.pt"
    shard.write_bytes(b"short")
    options = {"step": None, "max_shard_gib": 1.0, "dtype": None}
    assert export(Namespace(**options, run_dir=tmp_path, output=tmp_path / "model")) == 0
    captured = capsys.readouterr()
    assert "Exported: global_step_1" in captured.out
    assert (
        f"global_step_2 is newer than global_step_1, but incomplete: its file {shard.name} has 5 bytes" in captured.err
    )


def test_read_only_checkpoint_is_exported_elsewhere(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, pieces: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    make_trainer(small_config(quickstart, tmp_path, SHARDS)).save_checkpoint(1)
    monkeypatch.setattr(lease, "replace_file", refuse)
    target = tmp_path / "model"
    options = {"step": None, "max_shard_gib": 1.0, "dtype": None}
    assert export(Namespace(**options, run_dir=tmp_path, output=target)) == 0
    assert (target / "model.safetensors").is_file()
    assert "cannot protect" in capsys.readouterr().err


def test_manual_export_does_not_change_dtype_of_next_export(quickstart: Path, tmp_path: Path) -> None:
    setting = "trainer.checkpoint.export.dtype=fp16"
    make_trainer(small_config(quickstart, tmp_path, EVERYTHING, setting)).save_checkpoint(1)
    options = {"run_dir": tmp_path, "step": None, "max_shard_gib": 1.0}
    for dtype, expected in (("fp32", "float32"), (None, "float16")):
        assert export(Namespace(**options, output=None, dtype=dtype)) == 0
        named = json.loads((tmp_path / "global_step_1/huggingface/config.json").read_text())["dtype"]
        assert named == expected


def test_export_of_verl_checkpoint_defaults_to_bf16(quickstart: Path, tmp_path: Path) -> None:
    """Its configuration records the dtype of the shards."""
    make_trainer(small_config(quickstart, tmp_path, SHARDS)).save_checkpoint(1)
    checkpoint = tmp_path / "global_step_1"
    config = checkpoint / "huggingface/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}))
    assert export_dtype_of(checkpoint) == "bf16"
    for name in OURS:
        (checkpoint / name).unlink()
    assert export_dtype_of(checkpoint) == "bf16"
