"""Resuming with different training data of the same size prints a warning."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest
import torch

from tests.helpers.data import write_questions
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.checkpoint.save import sync_and_digest
from verl_ext.data import dataset
from verl_ext.data.config import ChatDataConfig, QuestionDataConfig
from verl_ext.data.dataset import sampled_digest, training_data_digest


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_sampled_digest_depends_on_content_not_path(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"other")
    digest = sampled_digest([one, other])
    assert digest == sampled_digest([shutil.copy(one, tmp_path / "c"), other])
    different = [
        sampled_digest([other, one]),
        sampled_digest([one]),
        sampled_digest([write(tmp_path / "a", b"onf"), other]),
        sampled_digest([write(tmp_path / "a", b"oneo"), write(tmp_path / "b", b"ther")]),
        sampled_digest([write(tmp_path / "a", b""), other]),
    ]
    assert len({digest, *different}) == 6


@pytest.mark.parametrize("num_files", [1, 3, 100])
def test_digest_of_large_files_covers_ends_and_sampled_blocks(num_files: int, tmp_path: Path) -> None:
    content = bytearray(torch.arange(100_000, dtype=torch.int32).numpy().tobytes())
    paths = [write(tmp_path / str(number), bytes(content)) for number in range(num_files)]
    with patch.multiple(dataset, MAX_BYTES=64_000, BLOCK_BYTES=1000):
        starts = dataset._block_starts(len(content), 64_000 // num_files)
        read = [start for start in starts if start + 1000 <= len(content)]
        assert len(read) == max(64_000 // num_files // 1000, 1) and read[-1] == len(content) - 1000
        assert read[0] == 0 or num_files == 100
        digest = sampled_digest(paths)
        for place in (read[0], read[len(read) // 2], len(content) - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            assert sampled_digest([write(tmp_path / "0", bytes(changed)), *paths[1:]]) != digest
        write(tmp_path / "0", bytes(content))
        assert sampled_digest(paths) == digest


def test_training_data_digest_excludes_validation_data(tmp_path: Path) -> None:
    folder = write_questions(tmp_path / "questions", 4, 2)
    sources = {"tiny": {"train": 4, "val": 2, "source": str(folder)}, "okvqa": {"train": 1, "val": 0}}
    images = QuestionDataConfig(datasets=sources)
    digest = training_data_digest(images)
    write_questions(folder, 4, 1)
    assert training_data_digest(images) == digest != ""  # validation data does not affect the training order
    write_questions(folder, 3, 1)
    assert training_data_digest(images) != digest
    assert training_data_digest(QuestionDataConfig(datasets={"okvqa": {"train": 1, "val": 0}})) == ""
    assert training_data_digest(ChatDataConfig(train_files=["hdfs://elsewhere/train.parquet"])) == ""


@pytest.mark.usefixtures("one_rank")
def test_resume_with_other_data_of_same_size_warns(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path / "run"))
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    capsys.readouterr()

    def warned(*overrides: str) -> bool:
        resumed = make_trainer(small_config(quickstart, tmp_path / "run", *overrides))
        assert resumed.global_step == 1 and resumed.train_sampler.batches_done == 1
        return "training data has changed since global_step_1" in capsys.readouterr().err

    assert not warned()
    copy = tmp_path / "copy.parquet"
    shutil.copy(quickstart / "train.parquet", copy)
    assert not warned(f"data.train_files={copy}")
    frame = pd.read_parquet(quickstart / "train.parquet")
    frame.iloc[::-1].to_parquet(copy)
    assert warned(f"data.train_files={copy}")
    remove_digest(tmp_path / "run/global_step_1")
    assert not warned(f"data.train_files={copy}")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name",
    ["trainer.trainer.training_data_digest", "trainer.trainer.is_verl_checkpoint"]
    + ["checkpoint.manager.load_optimizer", "checkpoint.hf_export.config_and_tokenizer_files"],
)
def test_failure_on_resume_reaches_all_ranks(
    name: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other ranks would hang. `gather_results` propagates each failure and names the rank."""
    config = small_config(quickstart, tmp_path / "run")
    trainer = make_trainer(config)
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()

    def fail(*arguments: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(f"verl_ext.{name}", fail)
    with pytest.raises(RuntimeError, match="(?s)rank 0 failed.*stale file handle"):
        make_trainer(config)


def remove_digest(checkpoint: Path) -> None:
    """Make the checkpoint look like one without the digest."""
    content = torch.load(checkpoint / "data.pt", weights_only=True)
    del content["data_digest"]
    torch.save(content, checkpoint / "data.pt")
    manifest = Manifest.read(checkpoint)
    files = {**manifest.files, "data.pt": sync_and_digest(checkpoint / "data.pt")}
    (checkpoint / "manifest.json").write_text(manifest.with_files(files).to_json())
