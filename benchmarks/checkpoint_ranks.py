"""What the ranks of `benchmarks.checkpoint` measure: saves of one sharded model by three managers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2

from benchmarks.harness import Results, in_rounds, medians, qwen2_size, ranges
from verl_ext.checkpoint.config import CheckpointConfig, Content
from verl_ext.checkpoint.inspection import size_on_disk
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.checkpoint.resume import verify_on_all_ranks
from verl_ext.distributed import gather_results
from verl_ext.files import GIB

CONTENTS: list[Content] = ["model", "optimizer", "extra", "hf_model"]
KINDS = ("verl", "sync", "async")
RESUMES = 3


class ShardedModel:
    """A sharded model whose optimizer has done one step.

    Args:
        device: cuda or cpu.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            **qwen2_size(768, 3072, layers=12, heads=12, vocab=32000),
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
            config=config,
            compute_dtype=torch.bfloat16,
            last_step=0,
            seed=0,
            dp_size=dist.get_world_size(),
            dp_rank=dist.get_rank(),
            updates_per_step=1,
            config_digest="",
            optimizer_name="AdamW",
            **arguments,
        )


def timed(work: Callable[[], object]) -> float:
    """Seconds from a common start until all ranks have finished."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure_save(
    model: ShardedModel, manager: FSDPCheckpointManager, directory: Path, numbers: Iterator[int]
) -> dict[str, float]:
    """Stall of one save, seconds of the steps meanwhile, and seconds until everything is on the disk."""
    step = next(numbers)
    path = str(directory / f"global_step_{step}")
    seconds = {"stall_s": timed(lambda: manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=1))}
    if isinstance(manager, CheckpointManager):
        meanwhile = []
        while all(gather_results(lambda: manager.is_writing)):  # so that all ranks do the same number of steps
            meanwhile.append(model.step())
        seconds["write_s"] = manager.wait() or 0.0
        seconds |= {"step_beside_s": statistics.median(meanwhile)} if meanwhile else {}
    seconds["flush_s"] = timed(os.sync)
    return seconds


def measure_plain(directory: Path, saved: Path) -> dict[str, float]:
    """Seconds until the ranks have written as many bytes as were saved, each rank its share to its own plain file."""
    directory.mkdir(exist_ok=True)
    path, piece = directory / f"rank_{dist.get_rank()}", memoryview(os.urandom(16 << 20))
    share = size_on_disk(saved) // dist.get_world_size()

    def write() -> None:
        left = share
        with path.open("wb", buffering=0) as file:
            while left:
                left -= file.write(piece[:left])
            os.fsync(file.fileno())

    seconds = timed(write)
    path.unlink()
    dist.barrier()
    os.sync()
    return {"plain_s": seconds}


def measure_resume(kind: str, device: str, tokenizer: AutoTokenizer, checkpoint: Path) -> dict[str, float]:
    """Seconds from a built model to the end of its first step after loading, with digests compared as in a run."""
    model = ShardedModel(device)
    manager = model.managed_by(kind, tokenizer)

    def resume() -> None:
        if kind != "verl":
            assert not verify_on_all_ranks(checkpoint)
        manager.load_checkpoint(str(checkpoint))
        model.step()

    return {"first_step_after_resume_s": timed(resume)}


def measure(directory: Path, tokenizer_of: str, repeats: int, quick: bool) -> Results:
    """Measure all saves and resumes.

    Args:
        directory: directory to save into.
        tokenizer_of: model directory with the tokenizer.
        repeats: measured saves of each kind.
        quick: whether to measure only verl's saves and our synchronous ones, without resuming.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shows_bars = dist.get_rank() == 0
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    model = ShardedModel(device)
    steps = [{"step_s": model.step()} for _ in range(1 if quick else 5)]
    kinds = KINDS[:2] if quick else KINDS
    sides: dict[str, Callable[[], dict[str, float]]] = {
        kind: partial(measure_save, model, model.managed_by(kind, tokenizer), directory / kind, count(1))
        for kind in kinds
    }
    sides["plain"] = partial(measure_plain, directory / "plain", directory / "sync")
    # the first save allocates what later ones reuse
    rounds = in_rounds(sides, repeats, "saving", warm_up=1, show=shows_bars)
    checkpoints = {} if quick else {kind: directory / kind / f"global_step_{repeats + 1}" for kind in ("verl", "sync")}
    resumes = {kind: partial(measure_resume, kind, device, tokenizer, path) for kind, path in checkpoints.items()}
    for kind, found in in_rounds(resumes, RESUMES, "resuming", show=shows_bars).items():
        rounds[kind] += found
    saved = {kind: medians(rounds[kind]) for kind in kinds}
    for kind, path in checkpoints.items():
        saved[kind]["gib"] = size_on_disk(path) / GIB
    stalls = {kind: saved[kind]["stall_s"] for kind in kinds}
    plain_s = medians(rounds["plain"])["plain_s"]
    return {
        "device": device,
        "ranks": dist.get_world_size(),
        "parameters": model.num_parameters,
        **medians(steps),
        "repeats": repeats,
        "saves": saved,
        "ranges": {**{kind: ranges(rounds[kind]) for kind in kinds}, **ranges(rounds["plain"]), **ranges(steps)},
        "plain_s": plain_s,
        "stall_of_sync_over_plain": stalls["sync"] / plain_s,
        **{f"stall_of_verl_over_{kind}": stalls["verl"] / stalls[kind] for kind in kinds[1:]},
    }
