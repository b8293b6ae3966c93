"""Configuration keys common to all stages take effect."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import NAMES, save
from tests.helpers.data import write_questions
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint import resume
from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.checkpoint.resume import agree_on_checkpoint, find_checkpoint
from verl_ext.data.chats import load_chats
from verl_ext.data.image_questions import load_image_questions
from verl_ext.errors import UserError
from verl_ext.metrics.registry import lookup_metric
from verl_ext.trainer.run_logger import RunLogger
from verl_ext.trainer.stages import STAGES, load_config
from verl_ext.trainer.tokenizer import load_tokenizer

RECIPE_OF_QUESTIONS = """
# questions
stage: {stage}
data: {{train_batch_size: 2, datasets: {{tiny: {{source: {folder}}}}}}}
"""


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_settings_take_effect(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = {"dtype": "fp16", "every": 2, "max_shard_gib": 0.001}
    best = {"keep_best": 3, "best_metric": "train/loss", "best_mode": "max", "drop_optimizer_of_best": True}
    words = [f"trainer.checkpoint.{name}={value}" for name, value in {**best, "async_save": True}.items()]
    words += [f"trainer.checkpoint.export.{name}={value}" for name, value in export.items()]
    words += ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=4", "trainer.total_training_steps=3"]
    trainer = make_trainer(small_config(quickstart, tmp_path, *words))
    rotations: list[tuple[object, ...]] = []
    threads: set[tuple[str, bool]] = set()

    def rotate(run_dir: Path, max_to_keep: int, config: CheckpointConfig, step: int, warn: object) -> None:
        kept = (config.keep_best, config.best_metric, config.best_mode, config.drop_optimizer_of_best)
        rotations.append((max_to_keep, *kept, step))
        threads.add((threading.current_thread().name, threading.current_thread().daemon))

    monkeypatch.setattr("verl_ext.checkpoint.save.rotate", rotate)
    for step in (1, 2, 3):
        trainer.save_checkpoint(step)
    assert trainer.checkpoint_manager.wait() is not None
    assert rotations == [(4, 3, "train/loss", "max", True, step) for step in (1, 2, 3)]
    assert threads == {("checkpoint", True)}  # a daemon thread, which does not keep a crashed rank alive
    num_files = [len(list(tmp_path.glob(f"global_step_{step}/huggingface/*.safetensors"))) for step in (1, 2, 3)]
    assert num_files[0] == 0 and num_files[1] > 1 and num_files[2] > 1  # the last step is always exported
    assert Manifest.read(tmp_path / "global_step_2").export_dtype == "fp16"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_export_uses_training_precision(precision: str, quickstart: Path, tmp_path: Path) -> None:
    words = ["trainer.checkpoint.export.dtype=auto", f"model.mixed_precision={precision}"]
    make_trainer(small_config(quickstart, tmp_path, *words)).save_checkpoint(1)
    assert Manifest.read(tmp_path / "global_step_1").export_dtype == precision


@pytest.mark.parametrize("stage", STAGES)
def test_stage_defaults_for_best_checkpoint_and_export(stage: str) -> None:
    checkpoint = STAGES[stage].root().trainer.checkpoint
    assert lookup_metric(checkpoint.best_metric).unit
    assert checkpoint.best_mode == ("min" if checkpoint.best_metric.endswith("loss") else "max")
    # controllers are small, and so are GRPO's steps
    assert checkpoint.export.dtype == {"budget": "fp32", "grpo": "auto"}.get(stage, "bf16")


@pytest.mark.usefixtures("one_rank")
def test_log_every_sets_interval_of_console_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[console]", "trainer.log_every=3"]
    config = load_config("sft", [*words, "health.enabled=false"])
    with RunLogger(config, 0, 100, 10, 1, True, "fp32", (12, 4)) as run_logger:
        for step in range(1, 8):
            run_logger.log(step, {"train/loss": 1.0})
    assert re.findall(r"step (\d+)/100", capsys.readouterr().out) == ["3", "6"]


@pytest.mark.usefixtures("one_rank")
def test_nonfinite_limit_and_trace_settings_take_effect(quickstart: Path, tmp_path: Path) -> None:
    words = ["trainer.max_nonfinite_steps=5", "trainer.trace=true"]
    trainer = make_trainer(small_config(quickstart, tmp_path, *words))
    assert trainer.guard.limit == 5 and [path.name for path in (tmp_path / "trace").iterdir()]


@pytest.mark.usefixtures("one_rank")
def test_verify_setting_compares_digests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        newest = save(tmp_path, step)
    (newest / NAMES[0]).write_bytes(b"X" * (newest / NAMES[0]).stat().st_size)  # of the same size
    words = [f"trainer.default_local_dir={tmp_path}", "trainer.checkpoint.verify="]
    for verifies, expected in (("false", newest), ("true", tmp_path / "global_step_1")):
        trainer = load_config("sft", [words[0], f"{words[1]}{verifies}"]).trainer
        assert agree_on_checkpoint(trainer, "torch.optim.AdamW") == expected
    assert "has the digest" in capfd.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_removed_before_verification_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as by the rotation of another run."""
    older, newest, other = save(tmp_path / "run", 1), save(tmp_path / "run", 2), save(tmp_path / "other", 3)

    def find_and_remove(*arguments: Any, **options: Any) -> Path | None:
        found = find_checkpoint(*arguments, **options)
        if found in (newest, other):
            shutil.rmtree(found)
        return found

    monkeypatch.setattr(resume, "find_checkpoint", find_and_remove)
    run_dir = f"trainer.default_local_dir={tmp_path / 'run'}"
    assert agree_on_checkpoint(load_config("sft", [run_dir]).trainer, "torch.optim.AdamW") == older
    assert "looking for the newest complete checkpoint" in capfd.readouterr().err
    trainer = load_config("sft", [run_dir, f"trainer.resume_from_path={other}"]).trainer
    with pytest.raises(UserError, match=f"{other} cannot be resumed: its file manifest.json is missing or damaged"):
        agree_on_checkpoint(trainer, "torch.optim.AdamW")


def test_token_cache_setting_sets_directory(quickstart: Path, tmp_path: Path) -> None:
    config = small_config(quickstart, tmp_path / "run", f"data.token_cache={tmp_path / 'tokens'}")
    load_chats(config.data, load_tokenizer(config))
    assert len(list((tmp_path / "tokens").glob("*.arrow"))) == 2  # of both files


@pytest.mark.parametrize(("command", "stage"), [("grpo", "budget"), ("sft", "vlm_sft")])
def test_question_suffix_is_appended_to_every_question(command: str, stage: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE_OF_QUESTIONS.format(stage=stage, folder=write_questions(tmp_path / "questions", 2, 1)))
    config = load_config(command, [f"recipe={recipe}", "data.question_suffix=' Short:'"])
    for dataset in load_image_questions(config.data):
        assert dataset is not None and all(sample.question.endswith("? Short:") for sample in dataset.samples)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("setting", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_forward_pass_uses_mixed_precision_dtype(
    setting: str, dtype: torch.dtype, quickstart: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, f"model.mixed_precision={setting}"))
    assert {parameter.dtype for parameter in trainer.optimizer.param_groups[0]["params"]} == {torch.float32}
    batch = next(iter(trainer.train_dataloader))
    with torch.no_grad():
        assert trainer.token_loss.logits(batch.micro_batches[0]).dtype == dtype
