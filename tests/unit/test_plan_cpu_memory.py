"""The check of free memory on CPUs: cgroups, the largest micro-batch of the data, and the warning."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from verl_ext import hardware
from verl_ext.data.batching import attention_share, plan_micro_batches
from verl_ext.data.dataset import TokenDataset
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.files import GIB
from verl_ext.hardware import Memory, cgroup_memory
from verl_ext.metrics.run_record import RunRecord
from verl_ext.plan import cpu_memory
from verl_ext.plan.cpu_memory import check_memory, largest_of_samples, plan_with_data
from verl_ext.plan.workload import packs
from verl_ext.trainer.config import GatheringFSDPConfig
from verl_ext.trainer.fsdp import FSDPReshardPolicy, keeps_gathered
from verl_ext.trainer.stages import RunConfig, SFTConfig, load_config

REASONING = ("recipe=smollm2_reasoning", "model.mixed_precision=fp32")


def write_group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")


def memory_v2(limit: str, current: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.current": str(current),
        "memory.stat": f"anon 7\ninactive_file {cache}\nactive_file 0",
    }


def memory_v1(limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(usage),
        "memory.stat": f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file {cache}",
    }


def test_smallest_headroom_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "slice/job", **memory_v2("1000", 400))
    write_group(tmp_path / "slice", **memory_v2("1500", 1200, cache=100))
    write_group(tmp_path.parent, **memory_v2("1", 0))  # outside the hierarchy
    assert cgroup_memory("0::/slice/job\n", tmp_path) == Memory(total=1000, available=1500 - 1200 + 100)
    write_group(tmp_path / "slice", **memory_v2("max", 1200))
    assert cgroup_memory("0::/slice/job\n", tmp_path) == Memory(total=1000, available=600)


def test_container_that_sees_only_its_own_group_is_limited(tmp_path: Path) -> None:
    write_group(tmp_path, **memory_v2("1000", 1200, cache=50))
    assert cgroup_memory("0::/", tmp_path) == Memory(total=1000, available=0)  # it is over its limit
    write_group(tmp_path / "memory", **memory_v1(1000, 700, cache=20))
    assert cgroup_memory("5:cpu:/\n4:memory:/docker/0123\n", tmp_path).available == 1000 - 700 + 2 * 20


def test_groups_without_limit_leave_everything(tmp_path: Path) -> None:
    write_group(tmp_path / "job", **memory_v2("max", 400))
    assert cgroup_memory("0::/job", tmp_path) == cgroup_memory("3:cpuset:/", tmp_path) == (math.inf, math.inf)
    assert cgroup_memory("", tmp_path) == (math.inf, math.inf)


class Samples(TokenDataset):
    """Samples of given lengths, of which the second half is in the loss."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = np.asarray(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = int(self.lengths[index])
        return {"row": index, "loss_mask": (torch.arange(length) >= length // 2).long()}

    def final_tokens(self) -> Any:
        raise NotImplementedError


def long_tailed(number: int, longest: int) -> Samples:
    return Samples(np.clip(np.random.default_rng(0).lognormal(5, 0.6, number), 8, longest).astype(np.int64))


def prompts(*lengths: int) -> list[dict[str, Any]]:
    return [{"prompt_ids": tuple(range(length))} for length in lengths]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with 24 GiB; call it with the free GiB."""
    monkeypatch.setattr(hardware, "cgroup_memory", lambda *_: Memory(math.inf, math.inf))

    def set_free(gib: float) -> None:
        status = SimpleNamespace(total=24 * GIB, available=gib * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: status)

    set_free(20)
    return set_free


def test_limited_process_does_not_keep_weights_gathered(free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    model = torch.nn.Linear(10_000, 10_000)  # 0.75 GiB with gradients
    assert keeps_gathered(GatheringFSDPConfig(), model, torch.float32, "cpu")
    monkeypatch.setattr(hardware, "cgroup_memory", lambda *_: Memory(total=4 * GIB, available=4 * GIB))
    assert not keeps_gathered(GatheringFSDPConfig(), model, torch.float32, "cpu")


def test_rank_with_little_memory_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gathers weights would wait for the others forever. The other rank is mocked."""
    monkeypatch.setattr("verl_ext.trainer.fsdp.gather_results", lambda function: [function(), False])
    policy = FSDPReshardPolicy.of_config(GatheringFSDPConfig(keep_gathered=True), Mock(), torch.float32, "cpu")
    assert not policy.keeps_gathered


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        (300, 24, ("masked", 2, 300 + 4 * 24)),  # a prompt with its completions per row is cheaper
        (20, 384, ("packed", 1, 20 + 7 + 8 * 384 + 3 * 20 + 3 * 7)),
    ],
)
@pytest.mark.usefixtures("free")
def test_largest_micro_batch_of_grpo_has_the_layout_of_training(
    prompt: int, completion: int, expected: tuple[str, int, int]
) -> None:
    changes = ["rollout.n=4", "data.micro_batch_size_per_gpu=8", f"data.max_response_length={completion}"]
    config = load_config("grpo", [*REASONING, *changes])
    work = plan_with_data(config, prompts(5, prompt, prompt if prompt > 100 else 7, 3), 2, 2, GIB).work
    assert (work.attention, work.rows, work.row_tokens) == expected
    assert work.loss_tokens == 8 * completion and work.num_micro_batches == 24 // 2 * 4 // 8


@pytest.mark.parametrize("changes", [[], ["data.packing=false"], ["data.max_tokens_per_gpu=700"]])
def test_largest_micro_batch_of_sft_is_that_of_the_epoch(changes: list[str]) -> None:
    config, data = load_config("sft", ["recipe=smollm2_135m", *changes]), long_tailed(1600, 384)
    assert isinstance(config, SFTConfig)
    found = largest_of_samples(config, data, 576, 2)(config)
    plan = plan_micro_batches(config.data, data.lengths, packs(config), attention_share(576))
    epoch = [plan.assign(rows, 2) for rows in GlobalBatchSampler(1600, 8, 0, 1, config.trainer.seed)]
    groups = [data.lengths[group] for ranks in epoch for rank in ranks for group in rank]
    sizes = [int(group.sum() if packs(config) else len(group) * group.max()) for group in groups]
    assert found.rows * found.row_tokens == max(sizes) and found.attention == ("packed" if packs(config) else "masked")
    assert found.num_micro_batches == max(len(rank) for ranks in epoch for rank in ranks)
    assert 0.3 < found.loss_tokens / found.logit_tokens < 0.6


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.usefixtures("free")
def test_resumed_run_is_planned_in_precision_of_its_first_start(
    has_units: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_memory, "has_bf16_units", lambda: has_units)
    config = load_config("sft", ["recipe=smollm2_135m", f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert config.model.mixed_precision == "auto"

    def compute_bytes() -> int:
        return plan_with_data(config, long_tailed(80, 384), 2, 2, GIB).work.compute_bytes

    assert compute_bytes() == (2 if has_units else 4)
    record = RunRecord(tmp_path / "run")
    record.start_attempt(first_step=0, world_size=2, total_steps=6, precision="fp32" if has_units else "bf16")
    assert compute_bytes() == (4 if has_units else 2)


def told(capsys: pytest.CaptureFixture[str], config: RunConfig, data: Any) -> str:
    check_memory(config, data, 2, 2)
    return capsys.readouterr().err


def test_warning_names_a_setting_that_fits(free: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data, large = prompts(*[208] * 30), "data.micro_batch_size_per_gpu=64"
    said = told(capsys, load_config("grpo", [*REASONING, large]), data)
    assert said.startswith("warning: training may take 11.5 GiB on each of 2 ranks, but only 10.0 GiB")
    assert "with data.micro_batch_size_per_gpu=32 it takes" in said and said.count("\n") == 1
    assert not told(capsys, load_config("grpo", [*REASONING, "data.micro_batch_size_per_gpu=32"]), data)
    free(30)
    assert not told(capsys, load_config("grpo", [*REASONING, large]), data)


def test_run_whose_state_does_not_fit_needs_another_machine(free: Any, capsys: pytest.CaptureFixture[str]) -> None:
    free(1.4)  # 12 bytes a parameter are 1.5 GiB
    said = told(capsys, load_config("grpo", REASONING), prompts(208))
    assert "but only 0.7 GiB of memory is free for each; no known setting makes it fit; use fewer ranks" in said


def test_advice_lowers_the_token_budget(free: Any, capsys: pytest.CaptureFixture[str]) -> None:
    free(12)
    words = ["recipe=smollm2_135m", "model.mixed_precision=fp32", "data.train_batch_size=128"]
    said = told(capsys, load_config("sft", [*words, "data.max_tokens_per_gpu=8192"]), long_tailed(640, 384))
    assert "with data.max_tokens_per_gpu=1024 it takes" in said


def test_failing_formulas_do_not_stop_run(
    free: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no heads")

    free(0)
    monkeypatch.setattr(cpu_memory, "shape_of", fail)
    said = told(capsys, load_config("grpo", REASONING), prompts(208))
    predicted = "the memory of this run cannot be predicted (no heads)"
    assert said == f"warning: {predicted}; training continues without the memory check\n"


def test_runs_without_plan_are_not_checked(free: Any, capsys: pytest.CaptureFixture[str]) -> None:
    free(0)
    for change in ("actor.use_kl_loss=true", "optim.optimizer=SGD"):
        assert not told(capsys, load_config("grpo", [*REASONING, change]), prompts(208))
    assert not told(capsys, load_config("sft", ["recipe=budget_vlm"]), None)


@pytest.mark.usefixtures("free")
def test_recipes_for_cpus_fit_into_24_gib(quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, smollm2 = f"model.partial_pretrain={quickstart}/model", "model.partial_pretrain=data/smollm2_135m"
    for recipe, which, longest in (
        ("quickstart", model, 256),
        ("smollm2_135m", smollm2, 384),
        ("smollm2_gsm8k", smollm2, 528),
    ):
        assert not told(capsys, load_config("sft", [f"recipe={recipe}", which]), long_tailed(800, longest)), recipe
    for recipe, which, longest in (
        ("quickstart", model, 128),
        ("smollm2_reasoning", smollm2, 384),
        ("smollm2_gsm8k", smollm2, 384),
    ):
        config = load_config("grpo", [f"recipe={recipe}", which])
        assert not told(capsys, config, prompts(*[longest] * 40)), recipe
