"""Defects of verl's checkpoint manager, shown on the stock class, and loading in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import get_fsdp_wrap_policy

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.hf_tensors import read_plan
from verl_ext.checkpoint.load import load_optimizer
from verl_ext.checkpoint.manifest import OPTIMIZER, shard_name
from verl_ext.checkpoint.rebuild import rebuild_export
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.errors import UserError
from verl_ext.trainer.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
MOMENTS = ("exp_avg", "exp_avg_sq")
EVERYTHING = "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


@pytest.fixture
def ours(quickstart: Path, tmp_path: Path) -> SFTTrainer:
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", EVERYTHING, "trainer.max_ckpt_to_keep=1"))
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    return trainer


def stock_of(trainer: SFTTrainer, *contents: str) -> FSDPCheckpointManager:
    contents = list(contents) or ["model", "optimizer", "extra", "hf_model"]
    return FSDPCheckpointManager(
        model=trainer.fsdp_model,
        optimizer=trainer.optimizer,
        lr_scheduler=trainer.lr_scheduler,
        processing_class=trainer.tokenizer,
        checkpoint_config=OmegaConf.create({"save_contents": contents, "load_contents": contents}),
    )


def no_room(*arguments: object) -> None:
    raise UserError("there is no room")


def test_verl_deletes_only_checkpoint_before_saving_next(ours: SFTTrainer, tmp_path: Path) -> None:
    stock = stock_of(ours)
    stock.save_checkpoint(str(tmp_path / "stock/global_step_1"), global_step=1, max_ckpt_to_keep=1)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        stock.save_checkpoint(str(tmp_path / "file/global_step_2"), global_step=2, max_ckpt_to_keep=1)
    assert not (tmp_path / "stock/global_step_1").exists()

    ours.save_checkpoint(1)
    (ours.run_dir / "global_step_2.tmp").touch()  # blocks the next save
    with pytest.raises(UserError, match=r"global_step_2\.tmp"):
        ours.save_checkpoint(2)
    assert (ours.run_dir / "global_step_1/manifest.json").exists()
    (ours.run_dir / "global_step_2.tmp").unlink()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="no room"):
        patch.setattr("verl_ext.checkpoint.save.create_files", no_room)  # after the directory was made
        ours.save_checkpoint(2)
    assert not list(ours.run_dir.glob("*.tmp*"))
    ours.save_checkpoint(2)
    ours.checkpoint_manager.wait()  # for the rotation
    assert [path.name for path in ours.run_dir.glob("global_step_*")] == ["global_step_2"]


def test_verl_exports_master_weights_in_float32(ours: SFTTrainer, tmp_path: Path) -> None:
    stock_of(ours).save_checkpoint(str(tmp_path / "stock"))
    ours.save_checkpoint(1)
    types = {}
    for name, directory in (("stock", tmp_path / "stock"), ("ours", ours.run_dir / "global_step_1")):
        with safe_open(directory / "huggingface/model.safetensors", framework="pt") as file:
            types[name] = {file.get_slice(key).get_dtype() for key in file.keys()}
    assert types == {"stock": {"F32"}, "ours": {"BF16"}}


def test_verl_checkpoint_can_be_exported(ours: SFTTrainer, tmp_path: Path) -> None:
    stock_of(ours).save_checkpoint(str(tmp_path / "global_step_1"))
    target = rebuild_export(tmp_path / "global_step_1", tmp_path / "model", "fp32", 1.0)
    rebuilt, written = (
        load_file(path / "model.safetensors") for path in (target, tmp_path / "global_step_1/huggingface")
    )
    assert rebuilt.keys() == written.keys()
    assert all(torch.equal(rebuilt[name], written[name]) for name in written)


def test_tied_tensors_without_plan_are_exported_once() -> None:
    embedding = torch.ones(3, 2)
    state = {"embed.weight": embedding, "norm.weight": torch.ones(2), "lm_head.weight": embedding}
    assert [weight.name for weight in read_plan(Path("nowhere"), state)] == ["embed.weight", "norm.weight"]


def spoil(trainer: SFTTrainer) -> None:
    """Overwrite the trained state, so that only a checkpoint can restore it."""
    with torch.no_grad():
        for parameter in trainer.fsdp_model.parameters():
            parameter.zero_()
    trainer.optimizer.state.clear()
    trainer.lr_scheduler.last_epoch = 99


def state_of(trainer: SFTTrainer) -> list[torch.Tensor]:
    moments = [entry["exp_avg"] for entry in trainer.optimizer.state.values()]
    whole = [tensor.full_tensor().clone() for tensor in [*trainer.fsdp_model.parameters(), *moments]]
    return [*whole, torch.tensor(trainer.lr_scheduler.last_epoch), torch.get_rng_state()]


@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_pipeline_and_verl_load_each_others_checkpoints(writer: str, ours: SFTTrainer, tmp_path: Path) -> None:
    stock, expected = stock_of(ours), state_of(ours)
    if writer == "stock":
        checkpoint = tmp_path / "stock/global_step_1"
        stock.save_checkpoint(str(checkpoint), global_step=1)
    else:
        checkpoint = ours.run_dir / "global_step_1"
        ours.save_checkpoint(1)
    spoil(ours)
    (ours.checkpoint_manager if writer == "stock" else stock).load_checkpoint(str(checkpoint))
    assert all(map(torch.equal, expected, state_of(ours)))


def moments_of(trainer: SFTTrainer, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    state = {name: optimizer.state[each] for name, each in trainer.fsdp_model.named_parameters() if each.requires_grad}
    return {name: [entry[key].full_tensor().clone() for key in MOMENTS] for name, entry in state.items()}


def test_verl_optimizer_with_frozen_parameters_is_loaded(quickstart: Path, tmp_path: Path) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", "model.lora_rank=2"))
    stock = stock_of(trainer, "model", "optimizer", "extra")
    stock.optimizer = torch.optim.AdamW(trainer.fsdp_model.parameters(), lr=1e-3)  # as verl gives it
    trainer.forward_backward(next(iter(trainer.train_dataloader)))
    stock.optimizer.step()
    stock.save_checkpoint(str(tmp_path / "global_step_1"))
    assert len(stock.optimizer.param_groups[0]["params"]) > len(trainer.optimizer.param_groups[0]["params"])
    trainer.checkpoint_manager.load_checkpoint(str(tmp_path / "global_step_1"))
    expected, found = (moments_of(trainer, optimizer) for optimizer in (stock.optimizer, trainer.optimizer))
    assert expected.keys() == found.keys()
    for name, moments in expected.items():
        assert all(map(torch.equal, moments, found[name]))
    assert next(iter(trainer.optimizer.state.values()))["step"] == 1


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_fsdp1_flat_parameters_are_loaded(num_ranks: int, ours: SFTTrainer, quickstart: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    units = FullyShardedDataParallel(
        model, auto_wrap_policy=get_fsdp_wrap_policy(model), device_id=torch.device("cpu"), use_orig_params=False
    )
    vectors = list(units.parameters())
    groups = torch.optim.AdamW(vectors, lr=1e-3).state_dict()["param_groups"]
    for rank in range(num_ranks):  # weights in place of moments, because they identify their parameter
        pieces = [FlatParamHandle._get_shard(vector.detach(), rank, num_ranks)[0] for vector in vectors]
        moments = [{"step": torch.tensor(5.0), "exp_avg": piece, "exp_avg_sq": 2 * piece} for piece in pieces]
        saved = {"state": dict(enumerate(moments)), "param_groups": groups}
        torch.save(saved, tmp_path / shard_name(OPTIMIZER, num_ranks, rank))
    load_optimizer(ours.fsdp_model, ours.optimizer, tmp_path)
    for name, (first, second) in moments_of(ours, ours.optimizer).items():
        assert torch.equal(first, weights[name]) and torch.equal(second, 2 * weights[name])
    for path in tmp_path.glob("*.pt"):
        saved = torch.load(path)
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"][:-1]
        torch.save(saved, path)
    with pytest.raises(UserError, match=r"has parameter groups of \[\d\] tensors"):
        load_optimizer(ours.fsdp_model, ours.optimizer, tmp_path)


def test_verl_loads_only_same_number_of_ranks(ours: SFTTrainer, tmp_path: Path) -> None:
    ours.save_checkpoint(1)
    checkpoint = ours.run_dir / "global_step_1"
    for path in checkpoint.glob("*_world_size_1_rank_0.pt"):  # the names that two ranks would use
        path.rename(path.with_name(path.name.replace("world_size_1", "world_size_2")))
    with pytest.raises((FileNotFoundError, AssertionError)):
        stock_of(ours).load_checkpoint(str(checkpoint))
    # ours loads any number (tests/integration/test_world_sizes.py); here it reports the missing shard
    with pytest.raises(UserError, match=r"1 model shards of \[2\] ranks"):
        ours.checkpoint_manager.load_checkpoint(str(checkpoint))


class Numbers(Dataset):
    """0, 1, 2, ..."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def test_verl_loader_skips_epoch_after_resume_at_epoch_end() -> None:
    loader = StatefulDataLoader(Numbers(), batch_size=2)
    at_the_end = [loader.state_dict() for _ in loader][-1]  # verl saves inside the loop
    resumed = StatefulDataLoader(Numbers(), batch_size=2)
    resumed.load_state_dict(at_the_end)
    assert list(resumed) == []  # and verl counts this as the next epoch

    ours = GlobalBatchSampler(4, 2, 0, 1, seed=0)
    for _ in range(len(ours)):
        ours.advance()
    again = GlobalBatchSampler(4, 2, 0, 1, seed=0)
    again.load_state_dict(ours.state_dict())
    assert len(list(again)) == 2


def test_checkpoint_from_another_device_resumes_but_verl_crashes(
    ours: SFTTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.save_checkpoint(1)
    ours.checkpoint_manager.wait()
    checkpoint = str(ours.run_dir / "global_step_1")
    monkeypatch.setattr("verl.utils.checkpoint.checkpoint_manager.get_device_name", lambda: "cuda")
    monkeypatch.setattr("verl.utils.checkpoint.checkpoint_manager.get_torch_device", lambda: torch.cuda)
    with pytest.raises(KeyError, match="cuda"):
        stock_of(ours).load_checkpoint(checkpoint)
    monkeypatch.setattr("verl_ext.checkpoint.manager.get_device_name", lambda: "cuda")
    draws = []
    for _ in range(2):
        ours.checkpoint_manager.load_checkpoint(checkpoint)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[1]
