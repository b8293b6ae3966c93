"""What the ranks of `benchmarks.checkpoint` measure: saves of one sharded model by three managers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2

from benchmarks.harness import Results, medians, qwen2_size, ranges
from verl_ext.checkpoint.config import CheckpointConfig, Content
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.checkpoint.resume import verify_on_all_ranks
from verl_ext.console import progress_bar
from verl_ext.files import GIB

CONTENTS: list[Content] = ["model", "optimizer", "extra", "hf_model"]
KINDS = ("verl", "sync", "async")
RESUMES = 3


class ShardedModel:
    """A sharded model with an optimizer that has made a step.

    Args:
        device: cuda or cpu.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            **qwen2_size(768, 3072, layers=12, heads=12, kv_heads=4, vocab=32000, tied=False),
            max_position_embeddings=512,
            architectures=["Qwen2ForCausalLM"],
        )
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
        """A manager of this model: one of KINDS."""
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
    """Seconds until all ranks have finished, from when all begin."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure_save(model: ShardedModel, manager: FSDPCheckpointManager, directory: Path, step: int) -> dict[str, float]:
    """Stall of one save, the seconds of steps meanwhile, and how long until all of it is on the disk."""
    path = str(directory / f"global_step_{step}")
    seconds = {"stall_s": timed(lambda: manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=1))}
    if isinstance(manager, CheckpointManager):
        meanwhile = []
        while all_writing(manager):
            meanwhile.append(model.step())
        seconds["write_s"] = manager.wait() or 0.0
        seconds |= {"step_beside_s": statistics.median(meanwhile)} if meanwhile else {}
    seconds["flush_s"] = timed(os.sync)
    return seconds


def all_writing(manager: CheckpointManager) -> bool:
    """Whether every rank is still writing, so that all make the same number of steps."""
    flag = torch.tensor(manager.is_writing, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def measure_plain(directory: Path, num_bytes: int) -> float:
    """Seconds until the ranks have written this many bytes to the disk, each its share to a file of its own."""
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
    """Seconds from a built model to the end of its first step after loading, with digests compared as in a run."""
    model = ShardedModel(device)
    manager = model.managed_by(kind, tokenizer)

    def resume() -> None:
        if kind != "verl":
            assert not verify_on_all_ranks(checkpoint)
        manager.load_checkpoint(str(checkpoint))
        model.step()

    return timed(resume)


def measure(directory: Path, tokenizer_of: str, repeats: int, quick: bool) -> Results:
    """All saves and resumes.

    Args:
        directory: to save into.
        tokenizer_of: directory of a model.
        repeats: saves of each kind that count.
        quick: only verl's saves and ours, none in the background, no resuming.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    model = ShardedModel(device)
    kinds = KINDS[:2] if quick else KINDS
    managers = {kind: model.managed_by(kind, tokenizer) for kind in kinds}
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    plain: list[float] = []
    steps = [model.step() for _ in range(1 if quick else 5)]
    for repeat in progress_bar(range(repeats + 1), desc="saving", unit="rounds", show=dist.get_rank() == 0):
        first = repeat % len(kinds)
        for kind in kinds[first:] + kinds[:first]:  # whatever a save leaves to the next one, each kind has it once
            seconds = measure_save(model, managers[kind], directory / kind, repeat + 1)
            rounds[kind] += [seconds] if repeat else []  # the first save allocates what later ones reuse
        own_bytes = bytes_of(directory / "sync" / f"global_step_{repeat + 1}")
        plain.append(measure_plain(directory / "plain", own_bytes))
    saved = {kind: medians(rounds[kind]) for kind in kinds}
    spreads = {kind: ranges(rounds[kind]) for kind in kinds}
    for kind in () if quick else ("verl", "sync"):
        checkpoint = directory / kind / f"global_step_{repeats + 1}"
        resumes = [measure_resume(kind, device, tokenizer, checkpoint) for _ in range(RESUMES)]
        saved[kind]["first_step_after_resume_s"] = statistics.median(resumes)
        spreads[kind]["first_step_after_resume_s"] = [min(resumes), max(resumes)]
        saved[kind]["gib"] = bytes_of(checkpoint) / GIB
    background = {} if quick else {"stall_of_verl_over_async": saved["verl"]["stall_s"] / saved["async"]["stall_s"]}
    return {
        "device": device,
        "ranks": dist.get_world_size(),
        "parameters": model.num_parameters,
        "step_s": statistics.median(steps),
        "repeats": repeats,
        "saves": saved,
        "ranges": {**spreads, **ranges([{"plain_s": seconds} for seconds in plain[1:]])},
        "plain_s": statistics.median(plain[1:]),
        "stall_of_sync_over_plain": saved["sync"]["stall_s"] / statistics.median(plain[1:]),
        "stall_of_verl_over_sync": saved["verl"]["stall_s"] / saved["sync"]["stall_s"],
        **background,
    }
