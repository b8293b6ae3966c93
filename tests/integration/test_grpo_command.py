"""`run_grpo.sh` on two ranks: it learns with either engine, and a run that was killed goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.helpers import ROOT
from verl_ext.errors import STOPPED_EXIT_CODE
from verl_ext.metrics.jsonl import read_metrics

TIMEOUT_S = 600
SPECIFIED = (
    *(f"train/reward_total_{figure}" for figure in ("mean", "std", "min", "max")),
    *(f"train/adv_{figure}" for figure in ("mean", "std", "min", "max")),
    *("train/exec_success_mean", "train/length_penalty_mean", "train/loss", "train/entropy"),
    *(f"train/seq_{part}_len_{figure}" for part in ("prompt", "completion", "total") for figure in ("mean", "max")),
    *("train/total_valid_token_count", "train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max"),
    *(f"time/train/{part}_s" for part in ("rollout", "reward", "advantages", "shard", "update", "step")),
    *("throughput/train/valid_tokens_per_s", "throughput/train/valid_tokens_per_s_update"),
)
EVALUATED = (
    *(f"eval/reward_total_{figure}" for figure in ("mean", "std", "min", "max")),
    *("eval/exec_success_mean", "eval/length_penalty_mean"),
    *(f"time/eval/{part}_s" for part in ("rollout", "reward", "step")),
    *("eval/total_valid_token_count", "throughput/eval/valid_tokens_per_s"),
)


def words(quickstart: Path, run_dir: Path, *overrides: str) -> list[str]:
    """The command; rewards differ between completions of a model that has learnt nothing yet."""
    return [
        *("bash", str(ROOT / "run_grpo.sh"), "2", "prepare=[]", f"trainer.default_local_dir={run_dir}"),
        *(f"data.train_files={quickstart}/prompts.parquet", f"data.val_files={quickstart}/val_prompts.parquet"),
        *(f"model.partial_pretrain={quickstart}/model", "data.train_batch_size=4", "actor.ppo_mini_batch_size=2"),
        *("data.micro_batch_size_per_gpu=4", "rollout.n=4", "data.max_response_length=16", "reward.length_buffer=15"),
        *("reward.functions=[exec_success,length_penalty]", "trainer.logger=[console]", "trainer.save_freq=2"),
        *("data.eval_every_steps=2", "data.eval_batches=2", "trainer.total_training_steps=4", *overrides),
    ]


def environment() -> dict[str, str]:
    """Of the command."""
    return {**os.environ, "VERL_EXT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def run(quickstart: Path, run_dir: Path, *overrides: str) -> str:
    """Run it to its end; returns what it said."""
    command = words(quickstart, run_dir, *overrides)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def by_step(run_dir: Path) -> dict[int, dict[str, Any]]:
    """All metrics of each step, the last attempt's."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        rows.setdefault(row["step"], {}).update(row)
    return rows


@pytest.fixture(scope="module")
def undisturbed(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps with vLLM."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run(quickstart, run_dir, "--trace", "trainer.log_samples_every=2")
    return run_dir


def test_every_specified_metric_is_there(undisturbed: Path) -> None:
    """And says what it must."""
    rows = by_step(undisturbed)
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        row = rows[step]
        assert not [name for name in SPECIFIED if name not in row]
        assert abs(row["train/adv_mean"]) < 1e-5 and row["train/rollout_logprob_diff_max"] < 1e-4
        assert row["train/reward_total_min"] <= row["train/reward_total_mean"] <= row["train/reward_total_max"]
        total = row["train/exec_success_mean"] + row["train/length_penalty_mean"]
        assert row["train/reward_total_mean"] == pytest.approx(total, abs=1e-6)
        assert row["train/ratio_deviation_max"] < 1e-5
        assert row["weights/version"] == step - 1 and row["weights/sync_s"] > 0
        # a measurement at the step before has sent them already
        assert (row["weights/bytes"] > 1e6) == (step % 2 == 0)
    assert any(rows[step]["train/grad_norm"] > 0 for step in rows if step)
    assert not [name for step in (0, 2, 4) for name in EVALUATED if name not in rows[step]]
    export = json.loads((undisturbed / "global_step_4" / "huggingface" / "config.json").read_text())
    assert export["dtype"] == "float32"  # what the training computes in, on a CPU


def test_samples_can_be_read(undisturbed: Path) -> None:
    """Every second step, of different prompts, each reward beside their sum."""
    rows = [json.loads(line) for line in (undisturbed / "samples.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [2, 4] and len(rows) == 16
    assert len({row["sample_id"] for row in rows if row["step"] == 2}) == 2
    for row in rows:
        assert "Write " in row["prompt"] and isinstance(row["answer"], str)
        assert row["reward_total"] == pytest.approx(row["exec_success"] + row["length_penalty"])


def test_the_trace_tells_each_samples_life(undisturbed: Path) -> None:
    """On every rank; the array needs no end."""
    for rank in (0, 1):
        text = (undisturbed / "trace" / f"attempt_1_rank_{rank}.json").read_text()
        events = json.loads(text.rstrip().removesuffix(",") + "]")
        parts = [event["name"] for event in events if event["ph"] == "X"]
        assert parts.count("step") == 4 and {"rollout", "reward", "advantages", "shard", "update"} <= {*parts}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        begun = [(e["id"], e["name"], e["ts"]) for e in events if e["ph"] == "b" and not e["id"].startswith("eval")]
        ended = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
        lives = {identity for identity, name, _ in begun if name == "update"}
        assert len(lives) == 4 * 2 * 4, "steps, prompts of a rank, samples"
        assert all(ended[identity, name] >= start for identity, name, start in begun)


def test_a_killed_run_goes_on_as_if_it_had_not_been(undisturbed: Path, quickstart: Path, tmp_path: Path) -> None:
    """The same losses and rewards, bit for bit."""
    run_dir = tmp_path / "run"
    tracker = run_dir / "latest_checkpointed_iteration.txt"
    with subprocess.Popen(words(quickstart, run_dir), env=environment(), start_new_session=True) as process:
        end = time.monotonic() + TIMEOUT_S
        while not (tracker.is_file() and tracker.read_text().strip() == "2"):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    run(quickstart, run_dir)
    expected, found = by_step(undisturbed), by_step(run_dir)
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"
    names = ("train/loss", "train/grad_norm", "train/reward_total_mean", "train/entropy", "train/seq_total_len_mean")
    for step in (3, 4):
        assert {name: found[step][name] for name in names} == {name: expected[step][name] for name in names}
    assert found[4]["eval/reward_total_mean"] == expected[4]["eval/reward_total_mean"]
    measured = pd.read_csv(run_dir / "validation_history.csv")
    assert list(measured["eval/reward_total_mean"])[-1] == expected[4]["eval/reward_total_mean"]


def test_a_stopped_run_with_everything_on(quickstart: Path, tmp_path: Path) -> None:
    """transformers for the rollouts, adapters, KL to a frozen reference, entropy, correction, replaced groups and two
    passes; asked to stop within a step it saves, and goes on as if it had not been asked."""
    settings = (
        *("rollout.engine=hf", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.entropy_coeff=0.01"),
        *("algorithm.rollout_correction.rollout_is=token", "algorithm.dynamic_sampling.max_rounds=1"),
        *("actor.ppo_epochs=2", "trainer.total_training_steps=6", "data.eval_every_steps=0", "model.lora_rank=4"),
    )
    run(quickstart, tmp_path / "whole", *settings, "trainer.save_freq=-1")
    run_dir = tmp_path / "stopped"
    metrics = run_dir / "metrics.jsonl"
    command = words(quickstart, run_dir, *settings, "trainer.save_freq=-1")
    with subprocess.Popen(command, env=environment(), start_new_session=True) as process:
        end = time.monotonic() + TIMEOUT_S
        while '"train/loss"' not in (metrics.read_text() if metrics.is_file() else ""):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == STOPPED_EXIT_CODE
    run(quickstart, run_dir, *settings, "trainer.save_freq=-1")
    expected, found = by_step(tmp_path / "whole"), by_step(run_dir)
    names = ("train/loss", "train/grad_norm", "train/reward_total_mean", "train/kl", "train/groups_replaced")
    for step in range(1, 7):
        assert {name: found[step][name] for name in names} == {name: expected[step][name] for name in names}
    assert expected[1]["train/kl"] == pytest.approx(0, abs=1e-3) and expected[6]["train/kl"] > 0
    assert "weights/sync_s" not in found[1] and "eval/reward_total_mean" not in found[2]
    assert found[1]["train/rollout_logprob_diff_max"] < 1e-4


def test_bad_input_is_one_sentence(quickstart: Path, tmp_path: Path) -> None:
    """Exit code 2 and no traceback, from the launcher and from the ranks."""
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    for override in ("rollout.n=1", f"reward.functions=[{tmp_path}/mine.py:score]", "data.max_prompt_length=3"):
        command = words(quickstart, tmp_path / "run", override)
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        said = done.stdout + done.stderr
        assert done.returncode == 2 and "Traceback" not in said, said
        assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, said
