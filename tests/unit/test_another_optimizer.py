"""Resuming with another optimizer is rejected, except from the weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.load import load_optimizer
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.checkpoint.shards import ShardFiles
from verl_ext.errors import UserError
from verl_ext.launch.configure import resume_candidate
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig

pytestmark = pytest.mark.usefixtures("one_rank")
SGD = ("optim.optimizer=SGD", "optim.override_optimizer_config={momentum: 0.9}")


@pytest.fixture
def run_dir(quickstart: Path, tmp_path: Path) -> Iterator[Path]:
    """A run with an AdamW checkpoint at step 1."""
    trainer = make_trainer(small_config(quickstart, tmp_path / "run"))
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    assert Manifest.read(tmp_path / "run/global_step_1").optimizer == "torch.optim.AdamW"
    return tmp_path / "run"


def remove_optimizer_from_manifest(run_dir: Path) -> None:
    """Make the checkpoint look like one from before the manifest recorded the optimizer."""
    path = run_dir / "global_step_1" / "manifest.json"
    content = json.loads(path.read_text())
    del content["optimizer"]
    path.write_text(json.dumps(content))


def resume(config: SFTConfig) -> None:
    trainer = make_trainer(config)
    assert trainer.global_step == 1
    trainer.training_step(next(trainer.batches()))


def test_launcher_and_ranks_reject_another_optimizer(quickstart: Path, run_dir: Path) -> None:
    config = small_config(quickstart, run_dir, *SGD)
    for refuse in (resume_candidate, make_trainer):
        with pytest.raises(UserError, match=r"torch\.optim\.AdamW.*torch\.optim\.SGD.*load_contents=\[model\]"):
            refuse(config)
    with pytest.raises(UserError, match=r"torch\.optim\.Adam\b"):  # same state, different weight decay
        resume_candidate(small_config(quickstart, run_dir, "optim.optimizer=Adam"))
    assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_1"]


def test_fused_optimizer_setting_may_change_on_resume(quickstart: Path, run_dir: Path) -> None:
    trainer = make_trainer(small_config(quickstart, run_dir, "optim.override_optimizer_config={fused: true}"))
    assert trainer.optimizer.param_groups[0]["fused"] is True
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(2)
    trainer.checkpoint_manager.wait()
    back = make_trainer(small_config(quickstart, run_dir))
    assert back.global_step == 2 and back.optimizer.param_groups[0]["fused"] is None
    assert {entry["step"].item() for entry in back.optimizer.state.values()} == {2}
    assert back.training_step(next(back.batches()))["train/loss"] > 0


def test_unnamed_optimizer_is_identified_by_hyperparameters(quickstart: Path, run_dir: Path) -> None:
    remove_optimizer_from_manifest(run_dir)
    with pytest.raises(UserError, match=r"betas.*momentum.*load_contents=\[model\]"):
        make_trainer(small_config(quickstart, run_dir, *SGD))
    resume(small_config(quickstart, run_dir))


def test_unknown_hyperparameters_of_newer_torch_are_accepted(
    quickstart: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_new_hyperparameter(optimizer: torch.optim.Optimizer) -> dict:
        state = torch.optim.Optimizer.state_dict(optimizer)
        return {**state, "param_groups": [{**group, "of_a_newer_torch": True} for group in state["param_groups"]]}

    monkeypatch.setattr(torch.optim.AdamW, "state_dict", with_new_hyperparameter, raising=False)
    resume(small_config(quickstart, run_dir))


@pytest.mark.parametrize("begins_elsewhere", [False, True])
def test_run_started_from_weights_resumes_with_optimizer(
    begins_elsewhere: bool, quickstart: Path, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["trainer.checkpoint.load_contents=[model]"]
    if begins_elsewhere:
        words.append(f"trainer.resume_from_path={run_dir}/global_step_1")
        run_dir = tmp_path / "other"
    else:
        words += SGD
    trainer = make_trainer(small_config(quickstart, run_dir, *words))
    assert trainer.global_step == 1 and not trainer.optimizer.state
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(2)
    trainer.checkpoint_manager.wait()
    assert resume_candidate(small_config(quickstart, run_dir, *words)) == run_dir / "global_step_2"
    resumed = make_trainer(small_config(quickstart, run_dir, *words))
    assert resumed.global_step == 2 and resumed.optimizer.state
    assert resumed.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()
    first, second = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Loading")]
    assert first.startswith("Loading only model from global_step_1")
    assert second.startswith("Loading model, optimizer, extra from global_step_2, which this run saved")


def test_start_from_weights_without_remaining_steps_is_rejected(
    quickstart: Path, run_dir: Path, tmp_path: Path
) -> None:
    named = f"trainer.resume_from_path={run_dir}/global_step_1", "trainer.total_training_steps=1"
    message = "global_step_1 continues after step 1, but this run ends at step 1; raise trainer.total_training_steps"
    for words in ([run_dir, "trainer.checkpoint.load_contents=[model]"], [tmp_path / "other"]):
        with pytest.raises(UserError, match=rf"{message}, or .* model.partial_pretrain=.*/global_step_1/huggingface "):
            make_trainer(small_config(quickstart, *words, *named))
    for words in (named, named[1:]):  # a finished run
        assert make_trainer(small_config(quickstart, run_dir, *words)).steps_left == 0


def test_new_optimizer_takes_learning_rate_of_resumed_schedule(quickstart: Path, run_dir: Path) -> None:
    [rate] = make_trainer(small_config(quickstart, run_dir)).lr_scheduler.get_last_lr()
    words = "trainer.checkpoint.load_contents=[model,extra]", f"trainer.resume_from_path={run_dir}/global_step_1"
    trainer = make_trainer(small_config(quickstart, run_dir, *words))
    assert not trainer.optimizer.state and trainer.lr_scheduler.get_last_lr() == [rate]
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [rate] != [0.0]


def test_optimizer_without_sharded_update_is_rejected(quickstart: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Adafactor of torch.optim cannot update sharded parameters"):
        make_trainer(small_config(quickstart, tmp_path / "run", "optim.optimizer=Adafactor"))


def test_changed_optim_keys_apply_to_first_step_after_resume(quickstart: Path, run_dir: Path) -> None:
    words = "optim.lr=1e-3", "optim.weight_decay=0.3", "optim.betas=[0.8,0.99]", "optim.lr_scheduler=constant"
    trainer = make_trainer(small_config(quickstart, run_dir, *words, "optim.lr_warmup_steps=0"))
    [group] = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-3, 0.3, (0.8, 0.99))
    assert trainer.training_step(next(trainer.batches()))["train/lr(1e-3)"] == 1.0
    assert trainer.lr_scheduler.get_last_lr() == [1e-3] and trainer.optimizer.state


def test_partial_resume_takes_learning_rate_of_new_schedule(quickstart: Path, run_dir: Path) -> None:
    words = [f"trainer.resume_from_path={run_dir}/global_step_1", "trainer.checkpoint.load_contents=[model,optimizer]"]
    words += ["optim.lr=1e-3", "optim.lr_scheduler=constant", "optim.lr_warmup_steps=0"]
    trainer = make_trainer(small_config(quickstart, run_dir, *words))
    [group] = trainer.optimizer.param_groups
    assert group["lr"] == group["initial_lr"] == 1e-3 and trainer.optimizer.state
    assert trainer.training_step(next(trainer.batches()))["train/lr(1e-3)"] == 1.0


def test_changed_optimizer_arguments_apply_after_resume(quickstart: Path, run_dir: Path) -> None:
    def with_arguments(arguments: str) -> SFTTrainer:
        return make_trainer(small_config(quickstart, run_dir, f"optim.override_optimizer_config={arguments}"))

    trainer = with_arguments("{eps: 0.1}")
    assert trainer.optimizer.param_groups[0]["eps"] == 0.1 and trainer.optimizer.state
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(2)
    trainer.checkpoint_manager.wait()
    assert with_arguments("null").optimizer.param_groups[0]["eps"] == 1e-8
    with pytest.raises(UserError, match=r"with amsgrad=False, but this run's has amsgrad=True; restore the optim"):
        with_arguments("{amsgrad: true}")


def test_optimizer_from_elsewhere_keeps_state_among_hyperparameters(
    quickstart: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in schedule-free optimizers, which count their steps in the parameter groups."""
    config = small_config(quickstart, run_dir, "optim.override_optimizer_config={eps: 0.1}")
    saved = torch.load(run_dir / "global_step_1/optim_world_size_1_rank_0.pt", weights_only=False)
    saved["param_groups"][0].update(maximize=True, eps=0.2)
    trainer = make_trainer(config)
    monkeypatch.setattr(ShardFiles, "content", lambda self, rank: saved)
    monkeypatch.setattr(torch.optim.AdamW, "__module__", "schedulefree")
    load_optimizer(trainer.model, trainer.optimizer, run_dir / "global_step_1", ["eps"])
    [group] = trainer.optimizer.param_groups
    assert group["maximize"] is True and group["eps"] == 0.1


def test_first_step_of_extended_run_follows_longer_schedule(quickstart: Path, tmp_path: Path) -> None:
    def config(num_steps: int) -> SFTConfig:
        return small_config(
            quickstart, tmp_path, f"trainer.total_training_steps={num_steps}", f"optim.total_training_steps={num_steps}"
        )

    finished = make_trainer(config(2))
    for _ in range(2):
        finished.training_step(next(finished.batches()))
        finished.train_sampler.advance()
    assert finished.lr_scheduler.get_last_lr() == [0.0]
    finished.save_checkpoint(2)
    finished.checkpoint_manager.wait()
    extended = make_trainer(config(4))
    assert extended.optimizer.param_groups[0]["lr"] == pytest.approx(extended.config.optim.lr / 2)
