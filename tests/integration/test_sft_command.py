"""`bash run_sft.sh` as a user types it: trains, is killed, goes on, is finished, and refuses bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import ROOT
from verl_ext.errors import STOPPED_EXIT_CODE

STEPS = "trainer.total_training_steps=20"  # two epochs of 10 steps
DOCUMENTED_TREE = {
    *(f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)),
    "fsdp_config.json",
    "data.pt",
    "manifest.json",
    *(f"huggingface/{name}" for name in ("config.json", "generation_config.json", "model.safetensors", "vocab.json")),
    *(f"huggingface/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")),
}


def with_dropout(model: Path) -> Path:
    """The same model with dropout, without which a resume that forgot the random state would go unseen."""
    copy = model.with_name("model_with_dropout")
    if not copy.exists():
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return copy


class Command:
    """`run_sft.sh 2` on the session's small quickstart with dropout, writing into one run directory."""

    def __init__(self, quickstart: Path, run_dir: Path) -> None:
        self.run_dir = run_dir
        model = with_dropout(quickstart / "model")
        self.words = [
            *("bash", str(ROOT / "run_sft.sh"), "2", "prepare=[]", f"trainer.default_local_dir={run_dir}"),
            *(f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"),
            *(f"model.partial_pretrain={model}", "data.train_max_samples=85", "data.train_batch_size=8"),
            *(
                "data.micro_batch_size_per_gpu=4",
                "trainer.save_freq=5",
                "trainer.test_freq=-1",
                "trainer.total_epochs=3",
            ),
            *("trainer.max_ckpt_to_keep=2", "trainer.logger=[console,wandb,tensorboard]"),
        ]
        self.environment = {**os.environ, "VERL_EXT_PYTHON": sys.executable, "WANDB_MODE": "offline"}

    def run(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words, *overrides], capture_output=True, text=True, env=self.environment, timeout=300
        )

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.words, *overrides], stdout=subprocess.DEVNULL, env=self.environment, start_new_session=True
        )

    def rows(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def losses(self, attempt: int | None = None) -> dict[int, float]:
        chosen = [row for row in self.rows() if attempt in (None, row["attempt"])]
        return {row["step"]: row["train/loss"] for row in chosen if "train/loss" in row}

    def record(self) -> dict:
        return json.loads((self.run_dir / "run.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    command = Command(quickstart, tmp_path_factory.mktemp("uninterrupted"))
    result = command.run(STEPS)
    assert result.returncode == 0, result.stderr
    command.output = result.stdout
    return command


def test_a_run_leaves_what_the_document_lists(uninterrupted: Command) -> None:
    run_dir = uninterrupted.run_dir
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "20"
    steps = sorted(path.name for path in run_dir.glob("global_step_*"))
    assert steps == ["global_step_15", "global_step_20"]  # max_ckpt_to_keep=2
    tree = {str(path.relative_to(run_dir / steps[-1])) for path in (run_dir / steps[-1]).rglob("*") if path.is_file()}
    assert tree >= DOCUMENTED_TREE
    assert len(pd.read_csv(run_dir / "training_history.csv")) == 20
    assert list(pd.read_csv(run_dir / "validation_history.csv")["step"]) == [0, 20]
    assert list((run_dir / "tensorboard").iterdir())
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert "val/loss" in uninterrupted.output
    assert "-m eval_pipeline watch" in uninterrupted.output
    record = uninterrupted.record()
    assert (record["status"], record["total_steps"], record["attempts"][0]["world_size"]) == ("finished", 20, 2)


def test_each_step_is_measured(uninterrupted: Command) -> None:
    row = next(row for row in uninterrupted.rows() if row["step"] == 10 and "train/loss" in row)
    names = {"train/lr(1e-3)", "train/time(s)", "train/grad_norm", "train/perplexity", "train/num_loss_tokens"}
    names |= {f"time/train/{part}_s" for part in ("step", "data", "forward_backward", "optimizer")}
    names |= {
        "throughput/train/tokens_per_s",
        "throughput/train/samples_per_s",
        "system/peak_memory_gib",
        "train/epoch",
    }
    assert names <= row.keys()
    assert row["train/epoch"] == 1.0
    parts = [row[f"time/train/{part}_s"] for part in ("data", "forward_backward", "optimizer")]
    assert sum(parts) <= row["time/train/step_s"] * 1.5  # maxima over ranks may come from different ranks
    assert any("time/train/save_s" in row for row in uninterrupted.rows())


def test_the_export_is_the_trained_model_in_bf16(uninterrupted: Command) -> None:
    checkpoint = uninterrupted.run_dir / "global_step_20"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(checkpoint / "huggingface").chat_template
    shards = [
        torch.load(checkpoint / f"model_world_size_2_rank_{rank}.pt", weights_only=False, map_location="cpu")
        for rank in (0, 1)
    ]
    for name, weight in model.state_dict().items():
        whole = torch.cat([shard[name]._local_tensor for shard in shards])
        assert torch.equal(weight, whole.to(torch.bfloat16)), name


def kill_after_step(command: Command, step: int) -> None:
    process = command.start(STEPS)
    try:
        while max(command.losses(), default=0) < step:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        ranks = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()  # the launcher alone: its ranks must not outlive it
        process.wait()
    assert len(ranks) >= 2
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


def test_a_killed_run_goes_on_bit_for_bit(uninterrupted: Command, quickstart: Path, tmp_path: Path) -> None:
    command = Command(quickstart, tmp_path)
    kill_after_step(command, 11)  # the checkpoint at 10 is the end of an epoch
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "att')  # as a crash in the middle of a line leaves it
    kill_after_step(command, 16)  # the checkpoint at 15 is in the middle of one
    kept = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    result = command.run(STEPS)
    assert result.returncode == 0, result.stderr
    assert f"Found checkpoint: {tmp_path}/global_step_{kept}\n" in result.stdout
    expected = uninterrupted.losses()
    for attempt in (1, 2, 3):
        losses = command.losses(attempt)
        assert losses == {step: expected[step] for step in losses}
    assert sorted(command.losses(attempt=3)) == list(range(kept + 1, 21))
    attempts = command.record()["attempts"]
    assert [attempt["first_step"] for attempt in attempts] == [0, 10, kept]
    assert all("without a word" in attempt["exit_reason"] for attempt in attempts[:2])
    assert attempts[0]["last_step"] >= 11
    ids = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert ids == {(tmp_path / "wandb_run_id.txt").read_text().strip()}


def test_a_request_to_stop_is_no_crash(quickstart: Path, tmp_path: Path) -> None:
    command = Command(quickstart, tmp_path)
    process = command.start(STEPS)
    while max(command.losses(), default=0) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=60) == STOPPED_EXIT_CODE
    assert command.record()["status"] == "stopped"
    attempt = command.record()["attempts"][0]
    assert attempt["exit_reason"] == f"stopped by SIGTERM after step {attempt['last_step']}"


def test_a_finished_run_is_left_alone_and_can_be_prolonged(uninterrupted: Command) -> None:
    before = uninterrupted.rows()
    again = uninterrupted.run(STEPS)
    assert again.returncode == 0
    assert "This run is finished" in again.stdout
    assert uninterrupted.rows() == before
    longer = uninterrupted.run("trainer.total_training_steps=22", "trainer.logger=[console]")
    assert longer.returncode == 0, longer.stderr
    assert sorted(uninterrupted.losses(attempt=2)) == [21, 22]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.max_length=20", "train.parquet row 0 cannot be used: it has"),
        ("trainer.logger=[console,nothing]", "no metrics backend is named 'nothing'"),
        ("optim.lr=1e30", "not finite for 3 steps in a row"),
        ("data.chat_template=/nowhere.jinja", "/nowhere.jinja, which does not exist"),
        ("model.attn_implementation=flash_attention_2", "needs a GPU"),
    ],
)
def test_what_only_the_ranks_can_see_is_refused_once(
    override: str, names: str, quickstart: Path, tmp_path: Path
) -> None:
    result = Command(quickstart, tmp_path).run(override, "trainer.val_before_train=false")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count(names) == 1
    assert "Traceback" not in result.stderr + result.stdout
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed"
    assert names in record["attempts"][-1]["exit_reason"]


def test_lora_exports_the_merged_model(quickstart: Path, tmp_path: Path) -> None:
    command = Command(quickstart, tmp_path)
    result = command.run("trainer.total_training_steps=4", "model.lora_rank=4", "trainer.logger=[]", "optim.lr=1e-2")
    assert result.returncode == 0, result.stderr
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_4/huggingface", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    changed = {
        name
        for name, weight in merged.state_dict().items()
        if not torch.equal(weight, base.state_dict()[name].to(torch.bfloat16).float())
    }
    assert any("q_proj.weight" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)


def test_tied_embeddings_and_gradient_checkpointing(quickstart: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(quickstart / "model").save_pretrained(tmp_path / "tied")
    command = Command(quickstart, tmp_path / "run")
    result = command.run(
        f"model.partial_pretrain={tmp_path}/tied",
        "model.enable_gradient_checkpointing=true",
        "trainer.total_training_steps=6",
    )
    assert result.returncode == 0, result.stderr
    losses = command.losses()
    assert losses[6] < losses[1]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/global_step_6/huggingface")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
