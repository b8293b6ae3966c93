"""What `benchmarks.checkpoint` measures: one sharded model, saved by turns with three managers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2

from verl_ext.checkpoint.config import CheckpointConfig, Content
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.checkpoint.resume import verify_on_all_ranks
from verl_ext.console import progress_bar
from verl_ext.files import GIB

CONTENTS: list[Content] = ["model", "optimizer", "extra", "hf_model"]
KINDS = ("verl", "sync", "async")


class Job:
    """A sharded model with an optimizer that has made a step.

    Args:
        device: cuda or cpu.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=32000, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
            architectures=["Qwen2ForCausalLM"],
        )  # fmt: skip
        self.device = device
        self.model = Qwen2ForCausalLM(config).to(device)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        apply_fsdp2(self.model, {"mesh": mesh, "reshard_after_forward": True}, {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.step()

    def step(self) -> float:
        """One training step; returns its seconds."""
        start = time.perf_counter()
        tokens = torch.randint(0, 32000, (1, 64), device=self.device)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def managed_by(self, kind: str, tokenizer: AutoTokenizer) -> FSDPCheckpointManager:
        """The manager of one of the KINDS over this job."""
        contents = {"save_contents": CONTENTS, "load_contents": CONTENTS}
        arguments = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        arguments["processing_class"] = tokenizer
        if kind == "verl":
            return FSDPCheckpointManager(checkpoint_config=OmegaConf.create(contents), **arguments)
        config = CheckpointConfig(
            save_contents=CONTENTS, load_contents=CONTENTS, async_save=kind == "async", keep_best=0
        )
        return CheckpointManager(
            config=config, compute_dtype=torch.bfloat16, last_step=0, seed=0, stream=0, **arguments
        )


def timed(work: Callable[[], object]) -> float:
    """Seconds from all ranks beginning to all ranks having ended."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure_save(job: Job, manager: FSDPCheckpointManager, directory: Path, step: int) -> dict[str, float]:
    """Stall of one save, what the steps beside it cost, and how long until all of it is on the disk."""
    path = str(directory / f"global_step_{step}")
    figures = {"stall_s": timed(lambda: manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=1))}
    if isinstance(manager, CheckpointManager):
        beside = []
        while all_writing(manager):
            beside.append(job.step())
        figures["write_s"] = manager.wait() or 0.0
        figures |= {"step_beside_s": statistics.median(beside)} if beside else {}
    figures["flush_s"] = timed(os.sync)
    return figures


def all_writing(manager: CheckpointManager) -> bool:
    """Whether every rank is still writing, so that all make the same number of steps."""
    flag = torch.tensor(manager.is_writing, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def measure_plain(directory: Path, num_bytes: int) -> float:
    """Seconds until the ranks have put so many bytes on the disk, each its part in a file of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    path, piece = directory / f"rank_{dist.get_rank()}", memoryview(os.urandom(16 << 20))

    def write() -> None:
        left = num_bytes // dist.get_world_size()
        with path.open("wb", buffering=0) as file:
            while left:
                left -= file.write(piece[:left])
            os.fsync(file.fileno())

    seconds = timed(write)
    path.unlink()
    dist.barrier()
    os.sync()
    return seconds


def bytes_of(checkpoint: Path) -> int:
    """Size of all files of a checkpoint."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def measure_resume(kind: str, device: str, tokenizer: AutoTokenizer, checkpoint: Path) -> float:
    """Seconds from a built model to the end of its first step after loading, digests compared as a run does."""
    job = Job(device)
    manager = job.managed_by(kind, tokenizer)

    def resume() -> None:
        if kind != "verl":
            assert not verify_on_all_ranks(checkpoint)
        manager.load_checkpoint(str(checkpoint))
        job.step()

    return timed(resume)


def measure(directory: Path, tokenizer_of: str, repeats: int, quick: bool) -> dict[str, Any]:
    """All figures of the run.

    Args:
        directory: to save into.
        tokenizer_of: directory of a model.
        repeats: saves of each kind that count.
        quick: verl's saves and ours alone, none in the background, no resuming.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    job = Job(device)
    kinds = KINDS[:2] if quick else KINDS
    managers = {kind: job.managed_by(kind, tokenizer) for kind in kinds}
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    plain: list[float] = []
    steps = [job.step() for _ in range(1 if quick else 5)]
    for repeat in progress_bar(range(repeats + 1), desc="saving", unit="rounds", show=dist.get_rank() == 0):
        turn = repeat % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:  # whatever a save leaves to the next one, each kind has it once
            figures = measure_save(job, managers[kind], directory / kind, repeat + 1)
            rounds[kind] += [figures] if repeat else []  # the first save allocates what later ones use again
        own_bytes = bytes_of(directory / "sync" / f"global_step_{repeat + 1}")
        plain.append(measure_plain(directory / "plain", own_bytes))
    saved = {kind: median_of(rounds[kind]) for kind in kinds}
    for kind in () if quick else ("verl", "sync"):
        checkpoint = directory / kind / f"global_step_{repeats + 1}"
        saved[kind]["first_step_after_resume_s"] = measure_resume(kind, device, tokenizer, checkpoint)
        saved[kind]["gib"] = bytes_of(checkpoint) / GIB
    background = {} if quick else {"stall_of_verl_over_async": saved["verl"]["stall_s"] / saved["async"]["stall_s"]}
    return {
        "device": device,
        "ranks": dist.get_world_size(),
        "parameters": job.num_parameters,
        "step_s": statistics.median(steps),
        "repeats": repeats,
        "saves": saved,
        "plain_s": statistics.median(plain[1:]),
        "stall_of_sync_over_plain": saved["sync"]["stall_s"] / statistics.median(plain[1:]),
        "stall_of_verl_over_sync": saved["verl"]["stall_s"] / saved["sync"]["stall_s"],
        **background,
    }


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds if name in figures) for name in rounds[0]}
