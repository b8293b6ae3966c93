"""`bash run_sft.sh`: a complete run, kills and an exact resume, a finished run, bad input, LoRA and tied weights.

The complete run, the kills and the resume always run in new processes; the other tests start warm.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.helpers.checkpoints import copy_checkpoints
from tests.helpers.commands import SFTRun, assert_resumes, kill_launcher, python
from tests.helpers.processes import ranks_of, wait_until
from verl_ext.metrics.run_record import LOST

NUM_STEPS = 12  # three epochs of 4 steps
OPTIONS = (
    *(f"trainer.total_training_steps={NUM_STEPS}", "trainer.total_epochs=3", "trainer.val_before_train=true"),
    "trainer.logger=[console,wandb,tensorboard]",
)
DOCUMENTED_TREE = {
    *(f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)),
    "fsdp_config.json",
    "data.pt",
    "manifest.json",
    *(f"huggingface/{name}" for name in ("config.json", "generation_config.json", "model.safetensors", "vocab.json")),
    *(f"huggingface/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")),
}


@pytest.fixture(scope="module")
def whole(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTRun, str]:
    """A finished run of new processes, and its output."""
    run = SFTRun(quickstart, tmp_path_factory.mktemp("whole"), *OPTIONS, cold=True)
    return run, run.finish().stdout


def column(path: Path, name: str) -> list[str]:
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def test_run_leaves_the_documented_files(whole: tuple[SFTRun, str]) -> None:
    run, output = whole
    assert run.tracker() == str(NUM_STEPS)
    assert run.names() == {"10", "12"}  # max_ckpt_to_keep=2
    last = run.run_dir / f"global_step_{NUM_STEPS}"
    assert {str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()} >= DOCUMENTED_TREE
    assert column(run.run_dir / "training_history.csv", "step") == [str(step) for step in range(1, NUM_STEPS + 1)]
    assert column(run.run_dir / "validation_history.csv", "step") == ["0", str(NUM_STEPS)]
    assert list((run.run_dir / "tensorboard").iterdir())
    assert len(list((run.run_dir / "wandb").glob("offline-run-*"))) == 1
    assert "val/loss" in output
    assert f"eval_pipeline/run.sh watch {run.run_dir}\n" in output and "warning" not in output
    console = (run.run_dir / "console.log").read_text()
    assert re.search(rf"^[-\d]+ [:\d]+ rank 0: step {NUM_STEPS}/{NUM_STEPS} ", console, re.MULTILINE)
    assert " launcher: Starting " in console and " launcher: Finished: " in console
    record = run.record()
    assert (record["status"], record["total_steps"]) == ("finished", NUM_STEPS)
    assert record["attempts"][0]["world_size"] == 2


def test_each_step_logs_time_and_throughput(whole: tuple[SFTRun, str]) -> None:
    rows = whole[0].rows()
    row = next(row for row in rows if row["step"] == 4 and "train/loss" in row)
    names = {"train/lr(1e-3)", "train/time(s)", "train/grad_norm", "train/perplexity", "train/num_loss_tokens"}
    names |= {f"time/train/{part}_s" for part in ("step", "data", "forward_backward", "optimizer")}
    names |= {f"throughput/train/{unit}_per_s" for unit in ("tokens", "samples")}
    names |= {"system/peak_memory_gib", "train/epoch"}
    assert names <= row.keys()
    assert row["train/epoch"] == 1.0
    parts = [row[f"time/train/{part}_s"] for part in ("data", "forward_backward", "optimizer")]
    assert sum(parts) <= row["time/train/step_s"] * 1.5  # maxima over ranks may come from different ranks
    assert any("time/train/save_s" in row for row in rows)


def test_export_is_the_trained_model_in_bf16(whole: tuple[SFTRun, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = whole[0].run_dir / f"global_step_{NUM_STEPS}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(checkpoint / "huggingface").chat_template
    shards = [
        torch.load(checkpoint / f"model_world_size_2_rank_{rank}.pt", weights_only=False, map_location="cpu")
        for rank in (0, 1)
    ]
    for name, weight in model.state_dict().items():
        gathered = torch.cat([shard[name]._local_tensor for shard in shards])
        assert torch.equal(weight, gathered.to(torch.bfloat16)), name


def kill_after_step(run: SFTRun, step: int) -> int:
    """SIGKILL the launcher once a step is logged; returns the step of the last checkpoint."""
    with run.started() as process:
        wait_until(lambda: run.last_logged() >= step, process)
        assert sorted(ranks_of(process.pid)) == [0, 1]
        kill_launcher(process)
    return int(run.tracker())


def test_killed_run_resumes_with_identical_losses(whole: tuple[SFTRun, str], quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path, *OPTIONS, cold=True)
    first = kill_after_step(run, 5)  # usually resumes from the checkpoint at step 4, the end of an epoch
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "att')  # as a crash in the middle of a write leaves it
    assert "sft), killed, step" in python("verl_ext.health", tmp_path).stdout
    second = kill_after_step(run, first + 3)
    result = run.finish()
    assert f"Found checkpoint: {tmp_path}/global_step_{second}\n" in result.stdout
    expected = whole[0].losses()
    for attempt in (1, 2, 3):
        losses = run.losses(attempt)
        assert losses == {step: expected[step] for step in losses}
    assert sorted(run.losses(attempt=3)) == list(range(second + 1, NUM_STEPS + 1))
    attempts = run.attempts()
    assert [attempt["first_step"] for attempt in attempts] == [0, first, second]
    assert [attempt["exit_reason"] for attempt in attempts[:2]] == [LOST, LOST]
    assert attempts[0]["last_step"] >= 5
    ids = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert ids == {(tmp_path / "wandb_run_id.txt").read_text().strip()}


def test_finished_run_is_unchanged_and_can_be_extended(whole: tuple[SFTRun, str], quickstart: Path) -> None:
    """Extends `whole` in place, because a copy is a different run; must be the last test that uses it."""
    run = SFTRun(quickstart, whole[0].run_dir, *OPTIONS)
    before = run.rows()
    leftover = run.run_dir / "global_step_0.removing"  # of a kill during the last rotation
    leftover.mkdir()
    assert "This run is finished" in run.finish().stdout
    assert run.rows() == before and not leftover.exists()
    run.finish("trainer.total_training_steps=14", "trainer.total_epochs=4", "trainer.logger=[console]")
    assert sorted(run.losses(attempt=2)) == [13, 14]


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("data.max_length=20", ["train.parquet row 0"]),
        ("optim.lr=1e30", ["not finite", "3 steps"]),
    ],
)
def test_bad_input_detected_by_ranks_is_reported_once(
    override: str, fragments: list[str], quickstart: Path, tmp_path: Path
) -> None:
    run = SFTRun(quickstart, tmp_path, override)
    result = run.start()
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    record = run.record()
    assert record["status"] == "failed"
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for fragment in fragments:
        assert fragment in error and fragment in record["attempts"][-1]["exit_reason"]


def test_lora_exports_merged_model(quickstart: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    options = ("trainer.total_training_steps=4", "model.lora_rank=4", "optim.lr=1e-2", "trainer.logger=[]")
    SFTRun(quickstart, tmp_path, *options, dropout=False).finish()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_4/huggingface", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(quickstart / "model").state_dict()
    changed = {
        name
        for name, weight in merged.state_dict().items()
        if not torch.equal(weight, base[name].to(torch.bfloat16).float())
    }
    assert any("q_proj.weight" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)


def test_tied_embeddings_train_with_gradient_checkpointing(quickstart: Path, tmp_path: Path) -> None:
    """And stay tied in a resumed run, which does not read the pretrained weights, on two ranks or on one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(quickstart / "model").save_pretrained(tmp_path / "tied")
    options = (f"model.partial_pretrain={tmp_path}/tied", "model.enable_gradient_checkpointing=true")
    run = SFTRun(quickstart, tmp_path / "run", *options)
    run.finish()
    losses = run.losses()
    assert losses[6] < losses[1]
    exported = AutoModelForCausalLM.from_pretrained(run.last_checkpoint / "huggingface")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    (tmp_path / "tied/model.safetensors").unlink()
    resumed, on_one = (SFTRun(quickstart, tmp_path / f"on_{n}", *options, num_ranks=n) for n in (2, 1))
    for each in (resumed, on_one):
        copy_checkpoints(run.run_dir, each.run_dir, 4)
    assert_resumes(resumed, run, 4)
    on_one.finish()
    assert on_one.losses() == pytest.approx({step: losses[step] for step in (5, 6)}, rel=1e-5)
