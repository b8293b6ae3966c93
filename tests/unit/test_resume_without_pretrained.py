"""A run resumes from its own checkpoint without reading the pretrained weights, and equals an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.models import write_family
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.hf_export import config_and_tokenizer_files
from verl_ext.checkpoint.hf_tensors import exported_tensors
from verl_ext.distributed import to_local
from verl_ext.errors import UserError
from verl_ext.trainer.model import can_fill, load_model
from verl_ext.trainer.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
SAVED_AT = 2
NEEDS_WEIGHTS = "model.partial_pretrain=.* cannot be loaded"


class Run:
    """A run that starts from its own copy of a model.

    Args:
        inputs: directory with `model/` and the data.
        directory: of the copy and the run.
        overrides: of the recipe, for every start.
    """

    def __init__(self, inputs: Path, directory: Path, *overrides: str) -> None:
        self.inputs, self.run_dir, self.model = inputs, directory / "run", directory / "model"
        self.overrides = (f"model.partial_pretrain={self.model}", "optim.lr=1e-2", *overrides)
        shutil.copytree(inputs / "model", self.model)
        self.weights = (self.model / "model.safetensors").read_bytes()

    @property
    def checkpoint(self) -> Path:
        return self.run_dir / f"global_step_{SAVED_AT}"

    def start(self, *overrides: str) -> SFTTrainer:
        return make_trainer(small_config(self.inputs, self.run_dir, *self.overrides, *overrides))

    def save(self) -> SFTTrainer:
        """Train, save, and remove the weights of the model; return the trainer, which can continue."""
        trainer = self.start()
        for _ in range(SAVED_AT):
            one_step(trainer)
        trainer.save_checkpoint(SAVED_AT)
        trainer.checkpoint_manager.wait()
        (self.model / "model.safetensors").unlink()
        return trainer

    def restore_weights(self) -> None:
        (self.model / "model.safetensors").write_bytes(self.weights)

    def edit_config(self, **values: Any) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def one_step(trainer: SFTTrainer) -> float:
    loss = trainer.training_step(next(trainer.batches()))["train/loss"]
    trainer.train_sampler.advance()
    return loss


def assert_equal(found: SFTTrainer, expected: SFTTrainer) -> None:
    """Compare everything that the next steps, checkpoints and exports depend on."""
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert structure_of(found) == structure_of(expected)


def tensors_of(trainer: SFTTrainer) -> list[torch.Tensor]:
    model, moments = trainer.model, [entry["exp_avg"] for entry in trainer.optimizer.state.values()]
    return [to_local(tensor) for tensor in (*model.parameters(), *model.buffers(), *moments)]


def structure_of(trainer: SFTTrainer) -> dict[str, Any]:
    model: Any = trainer.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_name = {id(parameter): name for name, parameter in reversed(parameters.items())}
    return {
        "tied": {name: first_name[id(parameter)] for name, parameter in parameters.items()},
        "trained": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "buffers": [name for name, _ in model.named_buffers(remove_duplicate=False)],
        "exports": exported_tensors(model),
        "files": config_and_tokenizer_files(model, trainer.tokenizer, torch.bfloat16),
        "forward": (trainer.packs, model.config._attn_implementation, trainer.token_loss.head is None),
    }


def assert_resumes_exactly(run: Run) -> SFTTrainer:
    """Resume without the pretrained weights; return the resumed trainer."""
    undisturbed = run.save()
    random_state = torch.get_rng_state()
    resumed = run.start()
    assert resumed.global_step == SAVED_AT
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_equal(resumed, undisturbed)
    assert one_step(resumed) == one_step(undisturbed)
    assert_equal(resumed, undisturbed)
    return resumed


@pytest.mark.parametrize(
    "override",
    ["model.fsdp_config.model_dtype=bf16", "model.lora_rank=2", "model.fsdp_config.cpu_offload=true"],
)
def test_resumed_run_equals_undisturbed_run(override: str, quickstart: Path, tmp_path: Path) -> None:
    assert_resumes_exactly(Run(quickstart, tmp_path, override))


def test_random_states_of_ranks_that_shared_other_sequences_are_not_loaded(quickstart: Path, tmp_path: Path) -> None:
    trainer = Run(quickstart, tmp_path).save()
    manager, checkpoint = trainer.checkpoint_manager, tmp_path / f"run/global_step_{SAVED_AT}"
    saved = torch.get_rng_state()
    torch.rand(1)
    manager._load_extra(checkpoint)
    assert torch.equal(torch.get_rng_state(), saved)
    manager.dp_size = 2  # as with another ulysses_sequence_parallel_size on the same number of ranks
    manager._load_extra(checkpoint)
    assert not torch.equal(torch.get_rng_state(), saved)


@pytest.mark.parametrize(
    ("family", "packs"),
    [("gemma3", True), ("gpt2", True), ("qwen3_moe", True), ("stablelm", False), ("gpt_oss", False), ("mamba", False)],
)
def test_resumed_run_of_family_equals_undisturbed_run(
    family: str, packs: bool, quickstart: Path, tmp_path: Path
) -> None:
    """With computed buffers, tied embeddings and experts; or with an initialization that uses random numbers."""
    resumed = assert_resumes_exactly(Run(write_family(family, quickstart, tmp_path / "inputs"), tmp_path))
    assert resumed.packs == packs


def test_resumed_run_without_fused_loss_equals_undisturbed_run(quickstart: Path, tmp_path: Path) -> None:
    run = Run(write_family("granite", quickstart, tmp_path / "inputs"), tmp_path)
    run.edit_config(logits_scaling=0.1)
    assert assert_resumes_exactly(run).token_loss.head is None


def test_resumed_run_without_generation_config_equals_undisturbed_run(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path)
    (run.model / "generation_config.json").unlink()
    assert_resumes_exactly(run)


def test_resumed_run_with_given_adapters_equals_undisturbed_run(
    quickstart: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapters")
    assert_resumes_exactly(Run(quickstart, tmp_path, f"model.lora_adapter_path={tmp_path}/adapters"))
    assert not [each for each in recwarn if "no-op" in str(each.message)]


# Pretrained weights are read


@pytest.mark.parametrize("override", ["model.fused_loss=false", "data.packing=false"])
def test_other_settings_need_weights(override: str, quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path)
    run.save()
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start(override)
    run.restore_weights()
    assert run.start(override).global_step == SAVED_AT


def test_custom_code_needs_weights(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path, "model.trust_remote_code=true")
    run.save()
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start()


def test_checkpoint_of_earlier_version_needs_weights(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(quickstart, tmp_path)
    with monkeypatch.context() as patch:
        data_state = SFTTrainer.data_state
        patch.setattr(SFTTrainer, "data_state", lambda trainer: {**data_state(trainer), "forward_check": {}})
        undisturbed = run.save()
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start()
    run.restore_weights()
    assert_equal(run.start(), undisturbed)


@pytest.mark.parametrize("contents", ["[model]", "[model,optimizer]", "[optimizer,extra]"])
def test_partial_resume_needs_weights(contents: str, quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path)
    run.save()
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start(f"trainer.resume_from_path={run.checkpoint}", f"trainer.checkpoint.load_contents={contents}")


def test_checkpoint_of_own_run_is_known_by_any_path(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path)
    run.save()
    relative = f"trainer.default_local_dir={os.path.relpath(run.run_dir)}"
    assert run.start(relative, f"trainer.resume_from_path={run.checkpoint}").global_step == SAVED_AT


def test_start_from_another_run_needs_weights(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path)
    run.save()
    another = f"trainer.resume_from_path={run.checkpoint}"
    run.run_dir = tmp_path / "other"
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start(another)


def test_other_names_in_files_need_weights(quickstart: Path, tmp_path: Path) -> None:
    """Exports split experts as the files that a run started from; here, these have one tensor for all experts."""
    run = Run(write_family("qwen3_moe", quickstart, tmp_path / "inputs"), tmp_path)
    state = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    save_file(state, run.model / "model.safetensors", {"format": "pt"})
    run.weights = (run.model / "model.safetensors").read_bytes()
    undisturbed = run.save()
    with pytest.raises(UserError, match=NEEDS_WEIGHTS):
        run.start()
    run.restore_weights()
    assert_equal(run.start(), undisturbed)


def test_model_that_cannot_be_empty_needs_weights(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(quickstart, tmp_path)
    undisturbed = run.save()
    run.restore_weights()

    def fail(**_: object) -> None:
        raise RuntimeError("a tensor has no data")

    monkeypatch.setattr("verl_ext.trainer.model.init_empty_weights", fail)
    assert_equal(run.start(), undisturbed)


def add_parameter_outside_state(model: PreTrainedModel) -> None:
    def remove(module: torch.nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        del state["hidden"]

    model.register_parameter("hidden", torch.nn.Parameter(torch.zeros(1)))
    model.register_state_dict_post_hook(remove)


@pytest.mark.parametrize(
    "change",
    [
        add_parameter_outside_state,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.register_parameter("added", torch.nn.Parameter(torch.zeros(1))),
        lambda model: model.register_buffer("computed", torch.zeros(1, device="meta"), persistent=False),
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "mxfp4"}),
    ],
    ids=["hidden_parameter", "dtype", "parameter", "buffer", "quantized"],
)
def test_other_models_cannot_be_filled(
    change: Callable[[PreTrainedModel], object], quickstart: Path, tmp_path: Path
) -> None:
    run = Run(quickstart, tmp_path)
    trainer = run.save()
    model = load_model(trainer.config, trainer.device_mesh, trainer.precision, is_empty=True)
    assert can_fill(run.checkpoint, model) and not model.training
    change(model)
    assert not can_fill(run.checkpoint, model)
