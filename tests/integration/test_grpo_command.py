"""`run_grpo.sh` on two ranks: metrics, samples and traces, exact resume after a kill and after a stop, bad input."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from eval_pipeline.judge import ERROR_TYPES
from tests.helpers.checkpoints import copy_checkpoints
from tests.helpers.commands import GRPORun, Hold, RecipeRun, SFTRun, TrainingRun, end_of, kill_launcher
from tests.helpers.judge import killing_judges
from verl_ext.checkpoint.manifest import damaged_files
from verl_ext.errors import STOPPED_EXIT_CODE

SPECIFIED = (
    *(f"train/reward_total_{statistic}" for statistic in ("mean", "std", "min", "max")),
    *(f"train/adv_{statistic}" for statistic in ("mean", "std", "min", "max")),
    *("train/exec_success_mean", "train/length_penalty_mean", "train/loss", "train/entropy"),
    *(f"train/seq_{part}_len_{value}" for part in ("prompt", "completion", "total") for value in ("mean", "max")),
    *("train/total_valid_token_count", "train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max"),
    *(f"time/train/{part}_s" for part in ("rollout", "reward", "advantages", "shard", "update", "step")),
    *("throughput/train/valid_tokens_per_s", "throughput/train/valid_tokens_per_s_update"),
)
EVALUATED = (
    *(f"eval/reward_total_{statistic}" for statistic in ("mean", "std", "min", "max")),
    *("eval/exec_success_mean", "eval/length_penalty_mean"),
    *(f"time/eval/{part}_s" for part in ("rollout", "reward", "step")),
    *("eval/total_valid_token_count", "throughput/eval/valid_tokens_per_s"),
)


def by_step(run: TrainingRun) -> dict[int, dict[str, Any]]:
    """All metrics of each step, from its last attempt."""
    rows: dict[int, dict[str, Any]] = {}
    for row in run.rows():
        rows.setdefault(row["step"], {}).update(row)
    return rows


def test_every_specified_metric_is_logged(grpo_run: GRPORun, shared: Path) -> None:
    rows = by_step(grpo_run)
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
        # a validation after the previous step has already sent the weights
        assert (row["weights/bytes"] > 1e6) == (step % 2 == 0)
    assert any(rows[step]["train/grad_norm"] > 0 for step in rows if step)
    assert not [name for step in (0, 2, 4) for name in EVALUATED if name not in rows[step]]
    for path in (shared / "grpo_run.out", grpo_run.run_dir / "train.log"):
        assert f"step 4/4 | loss {rows[4]['train/loss']:.4f} | reward " in (shown := path.read_text())
        for step in (0, 2, 4):
            assert f"step {step}/4 | eval reward {rows[step]['eval/reward_total_mean']:.3f} | " in shown
    export = json.loads((grpo_run.run_dir / "global_step_4" / "huggingface" / "config.json").read_text())
    assert export["dtype"] == "float32"  # the precision of training on a CPU


def test_samples_have_every_reward(grpo_run: GRPORun) -> None:
    rows = [json.loads(line) for line in (grpo_run.run_dir / "samples.jsonl").read_text().splitlines()]
    found: dict[tuple[str, int], list[tuple[str, int]]] = {(row["split"], row["step"]): [] for row in rows}
    for row in rows:
        found[row["split"], row["step"]].append((row["sample_id"], row["number"]))
        assert row["error_type"] in ERROR_TYPES and (row["advantage"] is None) == (row["split"] == "eval")
        assert "Write " in row["prompt"] and isinstance(row["answer"], str)
        assert row["reward_total"] == pytest.approx(row["exec_success"] + row["length_penalty"])
        assert row["exec_success"] == (row["error_type"] in ("success", "wrong_answer"))
    assert list(found) == [("eval", 0), ("train", 2), ("eval", 2), ("train", 4), ("eval", 4)]
    assert found["eval", 0] == found["eval", 2] == found["eval", 4], "the same prompts"
    for step in (2, 4):
        assert [number for _, number in found["train", step]] == [*range(4), *range(4)], "whole groups"


def test_tokens_have_both_log_probs(grpo_run: GRPORun) -> None:
    """Of the engine, and of the trainer before the update; their largest difference is the logged one."""
    files = {name: grpo_run.run_dir / f"{name}.jsonl" for name in ("samples", "sample_tokens")}
    samples, tokens = ([json.loads(line) for line in path.read_text().splitlines()] for path in files.values())
    keys = [(row["step"], row["sample_id"], row["number"]) for row in samples if row["split"] == "train"]
    assert [(row["step"], row["sample_id"], row["number"]) for row in tokens] == keys
    logged = {row["step"]: row["train/rollout_logprob_diff_max"] for row in grpo_run.rows() if "train/loss" in row}
    for row in tokens:
        mask = row["loss_mask"]
        pairs = [*zip(row["rollout_log_probs"], row["trainer_log_probs"])]
        assert len(mask) == len(pairs) == len(row["token_ids"]) == len(row["texts"]) and 0 < sum(mask) < len(mask)
        assert [pair == (None, None) for pair in pairs] == [not each for each in mask]
        assert all(abs(a - b) <= logged[row["step"]] + 1e-4 for (a, b), each in zip(pairs, mask) if each)


def test_trace_follows_each_sample(grpo_run: GRPORun) -> None:
    """On every rank; a trace is a JSON array without its closing bracket."""
    for rank in (0, 1):
        text = (grpo_run.run_dir / "trace" / f"attempt_1_rank_{rank}.json").read_text()
        events = json.loads(text.rstrip().removesuffix(",") + "]")
        parts = [event["name"] for event in events if event["ph"] == "X"]
        assert parts.count("step") == 4 and {"rollout", "reward", "advantages", "shard", "update"} <= {*parts}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        begun = [(e["id"], e["name"], e["ts"]) for e in events if e["ph"] == "b" and not e["id"].startswith("eval")]
        ended = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
        lives = {identity for identity, name, _ in begun if name == "update"}
        assert len(lives) == 4 * 2 * 4, "steps, prompts of a rank, samples"
        assert all(ended[identity, name] >= start for identity, name, start in begun)


def test_run_that_may_not_fit_into_memory_says_so(grpo_run: GRPORun, quickstart: Path, tmp_path: Path) -> None:
    """Rank 0 warns once and the run trains; the shared run, on the whole machine, says nothing."""
    small = "import psutil\nreal = psutil.virtual_memory\npsutil.virtual_memory = lambda: real()._replace(available={})"
    (tmp_path / "sitecustomize.py").write_text(small.format(1 << 30))
    one_step = ("trainer.total_training_steps=1", "data.eval_every_steps=0", "rollout.engine=hf")
    run = GRPORun(quickstart, tmp_path / "run", *one_step, cold=True)
    with run.started(PYTHONPATH=str(tmp_path)) as process:
        result = end_of(process)
    assert result.returncode == 0 and run.last_logged() == 1, result.stderr
    said = "on each of 2 ranks, but only 0.5 GiB of memory is free for each; "
    assert result.stderr.count(said) == (run.run_dir / "console.log").read_text().count(said) == 1
    assert "of memory is free" not in (grpo_run.run_dir / "console.log").read_text()


def test_killed_run_resumes_exactly(grpo_run: GRPORun, quickstart: Path, tmp_path: Path) -> None:
    """Killed before the save of step 4, it repeats steps 3 and 4 with bitwise identical losses and rewards.

    Meanwhile its judge servers are killed, and no zero takes the place of a reward.
    """
    run, hold = GRPORun(quickstart, tmp_path / "run"), tmp_path / "hold"
    hold.mkdir()
    before_the_save = Hold("verl_ext.checkpoint.save", "CheckpointWriter.prepare", "global_step_4")
    with run.held(before_the_save, hold) as held:
        kill_launcher(held.process)
    assert run.tracker() == "2" and run.last_logged() == 4
    with run.started() as process, killing_judges(process, seed=1) as killed:
        result = end_of(process)
    assert result.returncode == 0 and killed, result.stderr
    assert f"Found checkpoint: {run.run_dir}/global_step_2\n" in result.stdout
    expected, found = by_step(grpo_run), by_step(run)
    assert run.record()["status"] == "finished"
    names = ("train/loss", "train/grad_norm", "train/reward_total_mean", "train/entropy", "train/seq_total_len_mean")
    assert [row["step"] for row in run.rows() if row["attempt"] == 2 and "train/loss" in row] == [3, 4]
    for step in (3, 4):
        assert {name: found[step][name] for name in names} == {name: expected[step][name] for name in names}
    assert found[4]["eval/reward_total_mean"] == expected[4]["eval/reward_total_mean"]
    with open(run.run_dir / "validation_history.csv") as file:
        *_, last = csv.DictReader(file)
    assert float(last["eval/reward_total_mean"]) == expected[4]["eval/reward_total_mean"]


def test_stopped_run_with_all_options_resumes_exactly(quickstart: Path, tmp_path: Path) -> None:
    """Rollouts with transformers, adapters, KL loss, entropy, rollout correction, replaced groups and two epochs.

    SIGTERM during a step saves after it, and the resumed run has the metrics of an uninterrupted one. It finds the
    frozen weights, too, in its checkpoint.
    """
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))
    options = (
        f"model.partial_pretrain={model}",
        *("rollout.engine=hf", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.entropy_coeff=0.01"),
        *("algorithm.rollout_correction.rollout_is=token", "algorithm.dynamic_sampling.max_rounds=1"),
        *("actor.ppo_epochs=2", "trainer.total_training_steps=6", "data.eval_every_steps=0", "model.lora_rank=4"),
        "trainer.save_freq=-1",
    )
    whole, stopped = (GRPORun(quickstart, tmp_path / name, *options) for name in ("whole", "stopped"))
    whole.finish()
    (hold := tmp_path / "hold").mkdir()
    with stopped.held(Hold("verl_ext.trainer.grpo", "GRPOTrainer.training_step", call=2), hold) as held:
        held.process.send_signal(signal.SIGTERM)
        held.go.touch()
        assert end_of(held.process).returncode == STOPPED_EXIT_CODE
    assert 2 <= int(stopped.tracker()) < 6
    (model / "model.safetensors").unlink()
    stopped.finish()
    expected, found = by_step(whole), by_step(stopped)
    names = ("train/loss", "train/grad_norm", "train/reward_total_mean", "train/kl", "train/groups_replaced")
    for step in range(1, 7):
        assert {name: found[step][name] for name in names} == {name: expected[step][name] for name in names}
    assert expected[1]["train/kl"] == pytest.approx(0, abs=1e-3) and expected[6]["train/kl"] > 0
    assert "weights/sync_s" not in found[1] and "eval/reward_total_mean" not in found[2]
    assert found[1]["train/rollout_logprob_diff_max"] < 1e-4


def test_resumed_run_keeps_date_of_first_start(grpo_run: GRPORun, quickstart: Path, tmp_path: Path) -> None:
    """In the prompts of a template that renders the date."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y-%m-%d') }} {{ messages[-1].content }}")
    options = ("data.max_prompt_length=400", "data.eval_every_steps=0", "trainer.log_samples_every=1")
    dated = f"data.chat_template={tmp_path}/dated.jinja"
    run = GRPORun(quickstart, tmp_path / "run", "rollout.engine=hf", dated, *options, "trainer.total_training_steps=3")
    copy_checkpoints(grpo_run.run_dir, run.run_dir, 2)
    record = grpo_run.record()
    first, begun = (
        datetime.fromisoformat(text).astimezone() for text in (record["first_start"], record["attempts"][0]["start"])
    )
    assert timedelta(0) <= begun - first < timedelta(minutes=5)
    (run.run_dir / "run.json").write_text(json.dumps({**record, "first_start": "2020-07-04T09:30:00"}))
    run.finish()
    rows = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {(row["step"], row["prompt"].partition(" ")[0]) for row in rows} == {(3, "2020-07-04")}
    assert run.record()["first_start"] == "2020-07-04T09:30:00"


def test_bad_input_is_reported_once(quickstart: Path, tmp_path: Path) -> None:
    """An error that every rank detects: exit code 2, one message and no traceback. Starts cold."""
    done = GRPORun(quickstart, tmp_path / "run", "data.max_prompt_length=2", cold=True).start()
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in printed, printed
    [error] = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert "data.max_prompt_length=2" in error


def test_rank_without_memory_for_vllm_ends_run(quickstart: Path, tmp_path: Path) -> None:
    """Rank 0 has built its engine by then and waits for rank 1; the launcher reports the reason of rank 1."""
    (tmp_path / "own_models.py").write_text(
        "import os\nif os.environ.get('RANK') == '1': os.environ['VLLM_CPU_KVCACHE_SPACE'] = '100000'\n"
    )
    run = GRPORun(quickstart, tmp_path / "run", "model.external_lib=own_models")
    with run.started(PYTHONPATH=str(tmp_path)) as process:
        done = end_of(process)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "vLLM cannot use" in error and error.endswith("; end other processes, or use fewer ranks")


def test_starts_from_sft_run_without_evaluation(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    """The output names the checkpoint. A missing column fails the launch before any rank starts."""
    run = GRPORun(quickstart, tmp_path / "run", "model.partial_pretrain=null", f"model.sft_run={sft_run.run_dir}")
    done = run.start("data.prompt_key=nothing")
    [line] = [line for line in done.stdout.splitlines() if str(sft_run.run_dir) in line]
    assert f"{sft_run.last_checkpoint.name} " in line and f"run.sh watch {sft_run.run_dir}`" in line
    assert done.returncode == 2 and "'nothing'" in done.stderr and not run.run_dir.exists()


def test_missing_sft_run_error_names_command_to_create_it(tmp_path: Path) -> None:
    """The launch fails before anything is prepared."""
    sft_run = tmp_path / "rlvr_coding_model" / "vlm_quickstart"
    words = (f"model.sft_run={sft_run}", f"prepare=[vqa --output {tmp_path}/vqa]")
    done = RecipeRun("run_grpo.sh", "budget_controller", tmp_path / "run", *words, num_ranks=2).start()
    command = f"`bash run_sft.sh 2 recipe=budget_vlm trainer.default_local_dir={sft_run}`"
    assert done.returncode == 2 and command in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_reward_failing_on_every_sample_stops_run(quickstart: Path, tmp_path: Path) -> None:
    """From step 3 on: no update uses it, the run is not restarted, and the previous checkpoint is complete."""
    saved = tmp_path / "run" / "global_step_2"
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def score(solution_str, **others):\n"
        f"    if pathlib.Path({str(saved)!r}).exists(): raise ValueError('no good')\n"
        "    return len(solution_str) % 7\n"
    )
    options = (f"reward.functions=[{tmp_path}/mine.py:score]", "rollout.engine=hf", "data.eval_every_steps=0")
    run = GRPORun(quickstart, tmp_path / "run", *options, "trainer.log_every=1")
    done = run.start("--restarts", "2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "step 3: the reward score failed on all 16 samples (ValueError: no good)" in done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("mine.py") == 1
    [attempt] = run.attempts()
    assert run.record()["status"] == "failed" and "the reward score failed" in attempt["exit_reason"]
    assert sorted(run.losses()) == [1, 2] and run.tracker() == "2" and not damaged_files(saved)
    logged = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(logged) == 2 and all(
        part in line for line in logged for part in (" | reward ", " | length ", " | grad norm ")
    )


def test_engine_with_stale_weights_stops_run(quickstart: Path, tmp_path: Path) -> None:
    """Rank 1's engine drops the first update: no rank trains on its samples, and the command resumes."""
    from transformers import AutoTokenizer

    from tests.helpers.models import make_model, save

    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    model = save(tmp_path / "model", make_model(tokenizer, 1024), tokenizer)  # so small that its weights are one bucket
    (tmp_path / "mine.py").write_text("def length(solution_str, **rest): return float(len(solution_str))\n")
    words = (f"model.partial_pretrain={model}", f"reward.functions=[{tmp_path}/mine.py:length]", "optim.lr=0.01")
    steps = ("trainer.save_freq=1", "trainer.total_training_steps=2", "data.eval_every_steps=0")
    run = GRPORun(quickstart, tmp_path / "run", *words, *steps)
    fault = Hold("verl_ext.grpo.vllm_engine", "VLLMRolloutEngine.load_weights", rank=1, when="never", call=2)
    with run.started(**fault.variables(tmp_path)) as process:
        done = end_of(process)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "step 2: the engine's log-probabilities differ from the trained model's by" in line
    assert "Traceback" not in done.stderr
    assert run.names() == {"1"} and run.record()["attempts"][0]["exit_reason"] in done.stderr
    assert "global_step_1\n" in run.finish().stdout and run.last_logged() == 2
