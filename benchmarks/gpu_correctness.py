"""Parts of `benchmarks.gpu_check` that compare the GPU's results with the CPU, with float64, and between runs."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_check import GPUCheckSettings
from benchmarks.gpu_trainer import build_trainer, free_port, gathered, parameters_of, sft_config, sft_words
from benchmarks.harness import ROOT, qwen2_size, run
from verl_ext.checkpoint.compare import compare
from verl_ext.checkpoint.manifest import MODEL, OPTIMIZER
from verl_ext.errors import UserError
from verl_ext.grpo.algorithm import group_advantages
from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.sampling import Completion
from verl_ext.grpo.token_policy import TokenBatcher
from verl_ext.hardware import DEVICES
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics
from verl_ext.model_files import save_tokenizer
from verl_ext.trainer.grpo import GRPOTrainer, prompts_of
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import RunConfig, load_config

Gradients = Mapping[str, torch.Tensor]
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 5e-2)}
"""Maximum relative error of the loss, and of all gradients together, by dtype of the forward pass."""
SAVED_STEP, LAST_STEP = 10, 20
GROUP_SIZE, NUM_PROMPTS = 4, 4


# Loss and gradients


def losses(settings: GPUCheckSettings, *families: str) -> None:
    """Compare loss and gradients of one step with float64 for each dtype, and packed with padded samples."""
    for family in families:
        losses_of(settings, family)


def losses_of(settings: GPUCheckSettings, family: str) -> None:
    """Add the rows of a model family."""
    model = small_model(settings, family)
    reference: tuple[float, Gradients] | None = None
    for precision, (max_loss_error, max_error) in TOLERANCES.items():
        found = {}
        for variant, overrides in variants_of(precision).items():
            words = [f"model.mixed_precision={precision}", *overrides]
            trainer = build_trainer(sft_config(settings, model, *words), SFTTrainer)
            batch = next(trainer.batches())
            loss, _ = trainer.forward_backward(batch)
            found[variant] = gradients_of(trainer)
            reference = reference or in_float64(model, [trainer.train_dataset[row] for row in batch.rows])
            name, error = f"{family}, {precision}, {variant}", abs(float(loss) - reference[0]) / reference[0]
            settings.add_row(f"{name}: loss against float64", error, "relative", max_loss_error)
            distance = relative_distance(found[variant], reference[1])
            settings.add_row(f"{name}: gradients against float64", distance, "relative", max_error)
        distance = relative_distance(found["packed"], found["padded"])
        settings.add_row(f"{family}, {precision}: gradients, packed against padded", distance, "relative", max_error)


def variants_of(precision: str) -> dict[str, list[str]]:
    """Overrides by name of the variant: how samples share a forward pass, and how the loss is computed."""
    variants = {
        "packed": ["model.attn_implementation=sdpa"],
        "packed, all logits": ["model.attn_implementation=sdpa", "model.fused_loss=false"],
        "padded": ["data.packing=false", "model.attn_implementation=sdpa"],
    }
    if not torch.cuda.is_available():
        return variants
    if transformers.utils.is_flash_attn_2_available() and precision == "bf16":
        variants["packed, flash-attention"] = ["model.attn_implementation=flash_attention_2"]
    if transformers.utils.is_liger_kernel_available():
        variants["packed, Liger"] = ["model.attn_implementation=sdpa", "model.use_liger=true"]
    return variants


def gradients_of(trainer: SFTTrainer | GRPOTrainer) -> dict[str, torch.Tensor]:
    """The gradients of the last backward pass, in float64 on the CPU."""
    parameters = parameters_of(trainer.fsdp_model)
    return {name: gathered(each.grad).double() for name, each in parameters.items() if each.grad is not None}


def in_float64(model: Path, samples: list[dict[str, Any]]) -> tuple[float, Gradients]:
    """Mean cross-entropy over the loss tokens of all samples, and its gradients, sample by sample on the CPU."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(int(sample["loss_mask"][1:].sum()) for sample in samples)
    for sample in samples:
        logits = reference(input_ids=sample["input_ids"][None]).logits[0, :-1]
        in_loss = sample["loss_mask"][1:].bool()
        log_probs = logits.log_softmax(-1)[in_loss]
        loss = -log_probs.gather(1, sample["input_ids"][1:][in_loss][:, None]).sum() / num_tokens
        loss.backward()
        total += loss.detach()
    return float(total), {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}


def relative_distance(one: Gradients, other: Gradients) -> float:
    """Norm of the difference of all tensors relative to the norm of `other`; infinite if the names differ."""
    if set(one) != set(other):
        return math.inf
    difference = sum(float((one[name] - other[name]).square().sum()) for name in other)
    return math.sqrt(difference / sum(float(tensor.square().sum()) for tensor in other.values()))


def small_model(settings: GPUCheckSettings, family: str) -> Path:
    """A random model with the quickstart's tokenizer, in float32."""
    path = Path(settings.scratch) / family
    if path.exists():
        return path
    tokenizer = AutoTokenizer.from_pretrained(Path(settings.scratch) / "quickstart/model")
    hidden, layers = (64, 2) if settings.tiny else (512, 8)
    size = qwen2_size(hidden, 3 * hidden, layers, heads=8, vocab=len(tokenizer))
    size |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if family == "qwen3":
        size["head_dim"] = hidden // 8
    if family == "mistral":
        size["sliding_window"] = 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **size)).save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return path


# Runs of the command


def resume(settings: GPUCheckSettings) -> None:
    """Compare 20 uninterrupted steps bit for bit with a run that is killed after its first checkpoint and resumed."""
    words = [f"trainer.total_training_steps={LAST_STEP}", f"trainer.save_freq={SAVED_STEP}"]
    words += ["trainer.deterministic=true", "trainer.max_ckpt_to_keep=2"]
    straight, killed = (Path(settings.scratch) / name for name in ("straight", "killed"))
    model = small_model(settings, "qwen2")
    to_straight, to_killed = (
        ["bash", "run_sft.sh", str(settings.num_gpus), *sft_words(settings, model, run_dir, *words)]
        for run_dir in (straight, killed)
    )
    run(to_straight)
    killed_at = run_and_kill(to_killed, killed)
    settings.add_row("step at which the run was killed", killed_at, limit=LAST_STEP - 1)
    run(to_killed)
    expected, found = rows_by_step(straight), rows_by_step(killed)
    different = [
        step
        for step in range(1, LAST_STEP + 1)
        if any(expected[step][name] != found[step][name] for name in ("train/loss", "train/grad_norm"))
    ]
    settings.add_row("steps whose loss or gradient norm differs", len(different), limit=0)
    last = f"global_step_{LAST_STEP}"
    pairs = compare(straight / last, killed / last, (MODEL, OPTIMIZER), lambda _: None)
    names = [each.name for each in pairs if each.what]
    settings.add_row("tensors of the last checkpoint that differ", len(names), limit=0, note=", ".join(names[:3]))
    for each in (straight, killed):
        shutil.rmtree(each)


def devices(settings: GPUCheckSettings) -> None:
    """Compare a run that moves from the GPU to the CPU and back with a run on the GPU alone, in float32."""
    first = small_trainer(settings, "first_gpu")
    expected = trained(first, 4)
    first.save_checkpoint(4)
    expected |= trained(first, 12)
    on_cpu(settings, "devices_on_cpu")
    second = small_trainer(settings, "second_gpu", *resumed_from(settings, "cpu", 8))
    found = json.loads((Path(settings.scratch) / "cpu.json").read_text())
    found = {int(step): loss for step, loss in found.items()} | trained(second, 12)
    for where, steps in (("on the CPU", range(5, 9)), ("back on the GPU", range(9, 13))):
        error = max(abs(found[step] / expected[step] - 1) for step in steps)
        settings.add_row(f"losses {where}, steps {steps[0]} to {steps[-1]}", error, "relative", 1e-3)


def devices_on_cpu(settings: GPUCheckSettings) -> None:
    """The part of `devices` that runs on the CPU."""
    trainer = small_trainer(settings, "cpu", *resumed_from(settings, "first_gpu", 4))
    (Path(settings.scratch) / "cpu.json").write_text(json.dumps(trained(trainer, 8)))
    trainer.save_checkpoint(8)


def small_trainer(settings: GPUCheckSettings, name: str, *overrides: str) -> SFTTrainer:
    """A trainer of the small Qwen2 in float32, with a run directory of this name."""
    words = ["model.mixed_precision=fp32", f"trainer.default_local_dir={Path(settings.scratch) / name}", *overrides]
    return build_trainer(sft_config(settings, small_model(settings, "qwen2"), *words), SFTTrainer)


def resumed_from(settings: GPUCheckSettings, name: str, step: int) -> list[str]:
    """Overrides that name a checkpoint of another run."""
    checkpoint = Path(settings.scratch) / name / f"global_step_{step}"
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


def trained(trainer: SFTTrainer, last_step: int) -> dict[int, float]:
    """Train from the trainer's current step to the last one; returns the loss of each step."""
    losses_by_step = {}
    for batch in trainer.batches():
        losses_by_step[trainer.global_step] = trainer.training_step(batch)["train/loss"]
        trainer.train_sampler.advance()
        if trainer.global_step == last_step:
            break
    return losses_by_step


def run_and_kill(command: list[str], run_dir: Path) -> int:
    """Run a command and kill it with SIGKILL as soon as its first checkpoint is complete; returns its last step.

    Raises:
        UserError: the run ended before that.
    """
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    latest = run_dir / "latest_checkpointed_iteration.txt"
    while not latest.exists():
        if process.poll() is not None:
            raise UserError(f"the run ended with {process.returncode} before it could be killed")
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)  # the kernel kills the ranks with their launcher
    process.wait()
    return max(rows_by_step(run_dir))


def rows_by_step(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each training step; if a step ran twice, the metrics of the second time."""
    return {row["step"]: row for row in read_metrics(run_dir / METRICS_FILE) if "train/loss" in row}


def async_save(settings: GPUCheckSettings) -> None:
    """Compare a checkpoint that is written while the weights change with the weights at the time of the save."""
    trainer = small_trainer(settings, "async", "trainer.checkpoint.async_save=true")
    batches = trainer.batches()
    for _ in range(3):
        trainer.training_step(next(batches))
    expected = state_of(trainer)
    path = Path(settings.scratch) / "async/global_step_3"
    trainer.checkpoint_manager.save_checkpoint(str(path), global_step=3)
    num_meanwhile = 0
    while trainer.checkpoint_manager.is_writing or num_meanwhile < 3:
        trainer.training_step(next(batches))
        num_meanwhile += 1
    trainer.checkpoint_manager.wait()
    trainer.checkpoint_manager.load_checkpoint(str(path))
    found = state_of(trainer)
    names = [name for name in expected if not torch.equal(expected[name], found[name])]
    settings.add_row("steps while the save was being written", num_meanwhile)
    settings.add_row("tensors that are not those of the save's step", len(names), limit=0, note=", ".join(names[:3]))


def state_of(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    """Copies of weights and optimizer state on the CPU."""
    named = parameters_of(trainer.fsdp_model)
    state = {
        f"{name} {entry}": tensor
        for name, parameter in named.items()
        for entry, tensor in trainer.optimizer.state[parameter].items()
    }
    return {name: gathered(tensor).clone() for name, tensor in (named | state).items()}


# GRPO


def grpo(settings: GPUCheckSettings, engine: str) -> None:
    """Generate and update once on the GPU, and update again on the CPU; vLLM sleeps, wakes and generates again."""
    scratch = Path(settings.scratch)
    trainer = build_trainer(grpo_config(settings, engine), GRPOTrainer)
    trajectories = generated(trainer, 0)
    update = updated(trainer, trajectories)
    update["moved"] = largest_gap(trainer, trajectories)
    update["gap after the update"] = largest_gap(trainer, generated(trainer, 1))
    (scratch / f"{engine}.pickle").write_bytes(pickle.dumps((trajectories, update)))
    trainer.environment.close()
    trainer.policy.close()
    on_cpu(settings, "grpo_on_cpu", engine)


def grpo_on_cpu(settings: GPUCheckSettings, engine: str) -> None:
    """The part of `grpo` that runs on the CPU, and adds the rows."""
    trajectories, expected = pickle.loads((Path(settings.scratch) / f"{engine}.pickle").read_bytes())
    trainer = build_trainer(grpo_config(settings, "hf"), GRPOTrainer)
    gap = largest_gap(trainer, trajectories)
    found = updated(trainer, trajectories)
    settings.add_row("log-probabilities of the engine, against the CPU's", gap, "nat", 1e-3)
    stale = expected["gap after the update"] / expected["moved"]
    note = f"the update moves them by {expected['moved']:.3g} nat"
    settings.add_row("the same after the update, against the GPU's", stale, "of the move", 0.05, note)
    for name in ("loss", "grad_norm"):
        error = abs(expected[name] - found[name]) / max(abs(found[name]), 1e-3)
        settings.add_row(f"{name} of the update, against the CPU's", error, "relative", 1e-3)
    distance = relative_distance(expected["change"], found["change"])
    settings.add_row("change of the weights, against the CPU's", distance, "relative", 1e-2)
    trainer.environment.close()
    trainer.policy.close()


def grpo_rows(settings: GPUCheckSettings) -> None:
    """Compare packed rows, and rows that share a prompt, with padded rows in bf16; adds how long each takes."""
    words = {"model.partial_pretrain": small_model(settings, "qwen2"), "model.mixed_precision": "bf16"}
    trainer = build_trainer(grpo_config(settings, "hf", words), GRPOTrainer)
    policy, trajectories = trainer.policy, random_trajectories(*((20, 40) if settings.tiny else (200, 1000)))
    batchers = {
        "padded": TokenBatcher(trainer.tokenizer.pad_token_id),
        "packed": TokenBatcher(trainer.tokenizer.pad_token_id, packs=True),
        "shared": TokenBatcher(trainer.tokenizer.pad_token_id, lambda rows, length: rows),
    }
    found: dict[str, tuple[torch.Tensor, Gradients]] = {}
    for name, batcher in batchers.items():
        micro_batch = batcher.collate(trajectories)
        for _ in range(2):  # the first one allocates
            trainer.fsdp_model.zero_grad()
            start = time.perf_counter()
            values = policy.log_probs(micro_batch).values
            values.sum().backward()
            loss = float(values.sum().detach())  # waits for the GPU
            seconds = time.perf_counter() - start
        assert math.isfinite(loss)
        settings.add_row(f"{name}: forward and backward pass", seconds, "s")
        found[name] = values.detach().cpu(), gradients_of(trainer)
    expected, gradients = found.pop("padded")
    for name, (values, own) in found.items():
        gap = float((values - expected).abs().max())
        settings.add_row(f"{name}: log-probabilities, against padded", gap, "nat", 0.1)
        settings.add_row(f"{name}: gradients, against padded", relative_distance(own, gradients), "relative", 0.05)
    trainer.environment.close()
    policy.close()


def random_trajectories(prompt_tokens: int, max_tokens: int) -> list[Trajectory]:
    """Two prompts with eight completions each of different lengths, all of random tokens."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 300) for _ in range(count))

    trajectories = []
    for index in range(2):
        prompt = Prompt(f"p{index}", index, {"prompt_ids": tokens(prompt_tokens)})
        for number in range(8):
            length = rng.randint(max_tokens // 8, max_tokens)
            completion = Completion(tokens(length), torch.zeros(length), truncated=False)
            trajectories.append(Trajectory(prompt, number).act(completion))
    return trajectories


def grpo_config(settings: GPUCheckSettings, engine: str, words: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """The quickstart's GRPO recipe in float32, with SGD, whose update is the gradient; `words` override settings."""
    data = Path(settings.scratch) / "quickstart"
    overrides = {
        "prepare": "[]",
        "data.train_files": data / "prompts.parquet",
        "data.val_files": "null",
        "data.eval_every_steps": 0,
        "data.train_batch_size": NUM_PROMPTS,
        "data.max_response_length": 32,
        "actor.ppo_mini_batch_size": "null",
        "model.sft_run": "null",
        "model.partial_pretrain": data / "model",
        "model.mixed_precision": "fp32",
        "rollout.engine": engine,
        "rollout.n": GROUP_SIZE,
        "rollout.dtype": "float32",
        "rollout.gpu_memory_utilization": 0.3,
        "reward.functions": "[length_penalty]",
        "optim.optimizer": "SGD",
        "optim.lr": 1.0,
        "optim.weight_decay": 0.0,
        "optim.clip_grad": 1e6,
        "trainer.default_local_dir": Path(settings.scratch) / f"grpo_{engine}",
        "trainer.logger": "[]",
        **words,
    }
    return load_config("grpo", ["recipe=quickstart", *(f"{key}={value}" for key, value in overrides.items())])


def generated(trainer: GRPOTrainer, version: int) -> list[Trajectory]:
    """Completions of the current model. Their numbers are the rewards, because a random model has no good answers."""
    prompts = prompts_of([trainer.train_dataset[row] for row in range(NUM_PROMPTS)])
    trainer.global_step = version + 1
    with trainer.policy.sampling(version):
        trajectories = trainer.step.rollout(prompts, version + 1, GROUP_SIZE)
    values = [float(trajectory.number) for trajectory in trajectories]
    for trajectory, advantage in zip(trajectories, group_advantages(values, GROUP_SIZE, divide_by_std=True)):
        trajectory.advantage = advantage
    return trajectories


def updated(trainer: GRPOTrainer, trajectories: list[Trajectory]) -> dict[str, Any]:
    """Update once; returns the loss, the gradient norm and the change of the weights."""
    parameters = parameters_of(trainer.fsdp_model)
    before = {name: gathered(each).clone() for name, each in parameters.items()}
    trainer.fsdp_model.train()
    metrics = trainer.step.update(trajectories)
    change = {name: (gathered(each) - before[name]).double() for name, each in parameters.items()}
    return {"loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"], "change": change}


@torch.no_grad()
def largest_gap(trainer: GRPOTrainer, trajectories: list[Trajectory]) -> float:
    """Largest difference, in nat, between the rollout's log-probabilities and the model's own."""
    micro_batch = trainer.policy.collate(trajectories)
    values = trainer.policy.log_probs(micro_batch).values.cpu()
    return float((values - micro_batch["rollout_log_probs"])[micro_batch["response_mask"].bool()].abs().max())


def on_cpu(settings: GPUCheckSettings, function: str, *words: str) -> None:
    """Run another function of this module in a process that sees no GPU.

    Raises:
        UserError: the function failed.
    """
    run(settings.command("gpu_correctness", function, *words), {DEVICES: "", "MASTER_PORT": str(free_port())})
