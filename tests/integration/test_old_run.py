"""A run directory of a development version before 0.1.0: a finished run stays finished, and the run can be resumed.

`tests/data/old_run` was written by commit 0a96a70, on torch 2.9.1 and transformers 4.57.6: a one-layer model, trained
for two steps in the directory that holds `model`, `train.parquet` and `run`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import environment, python
from verl_ext.config.schema import as_dict
from verl_ext.metrics.jsonl import read_metrics
from verl_ext.metrics.run_record import load_run
from verl_ext.trainer.stages import read_config

WORDS = (
    "recipe=quickstart", "prepare=[]", "data.train_files=train.parquet", "data.val_files=null",
    "model.partial_pretrain=model", "trainer.default_local_dir=run", "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=1", "data.train_batch_size=4", "data.micro_batch_size_per_gpu=4", "trainer.logger=[]",
    "data.token_cache=tokens",
    # what the recipe has changed since
    "data.packing=true", "model.mixed_precision=auto",
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests/data/old_run", tmp_path / "old"))


def launched(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words_of_run = ("verl_ext.launch", "sft", "1", *WORDS, *words)
    done = python(*words_of_run, cwd=directory, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def files_of(run_dir: Path) -> dict[str, bytes]:
    paths = [path for path in run_dir.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


def test_finished_run_stays_finished(directory: Path) -> None:
    before = files_of(directory / "run")
    done = launched(directory, "trainer.total_training_steps=2")
    assert done.stdout.startswith("This run is finished")
    assert files_of(directory / "run") == before


def test_run_resumes_from_its_checkpoint(directory: Path) -> None:
    launched(directory, "trainer.total_training_steps=3")
    rows = [row for row in read_metrics(directory / "run/metrics.jsonl") if "train/loss" in row]
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 2)]
    assert (directory / "run/latest_checkpointed_iteration.txt").read_text() == "3"
    former, attempt = load_run(directory / "run/run.json")["attempts"]
    assert attempt["config_changes"]["trainer.total_training_steps"] == [2, 3] and "command" not in former
    assert attempt["config_defaults"]["trainer.total_training_steps"] is None
    assert attempt["command"].endswith(
        " 1 recipe=quickstart 'prepare=[]' " + shlex.join(WORDS[2:]) + " trainer.total_training_steps=3"
    )
    assert attempt["packages"]["torch"] and attempt["device_names"] and len(attempt["git_commit"]) == 40


def test_configuration_gets_defaults_of_new_keys(directory: Path) -> None:
    config = as_dict(read_config(directory / "run/config.yaml"))
    assert config["data"]["train_batch_size"] == 4 and config["trainer"]["total_training_steps"] == 2
    assert config["trainer"]["deterministic"] is False  # added since
