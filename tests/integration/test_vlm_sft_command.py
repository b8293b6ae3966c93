"""`run_sft.sh` with a recipe of the stage vlm_sft: it learns on any number of ranks, including with skipped blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.commands import RecipeRun

if TYPE_CHECKING:
    import torch

    from verl_ext.controller.adapters import VLMAdapter

TIERS = (256, 1024, 4096)
NUM_STEPS = 6
SEED = 7
"""With this seed the first micro-batch skips two blocks."""
RECIPE = """
# a tiny model
stage: vlm_sft
data: {{train_batch_size: 8, micro_batch_size_per_gpu: 2, datasets: {{tiny: {{source: {questions}}}}}}}
model: {{partial_pretrain: {model}}}
configurations: {{tier_sizes: [256, 1024, 4096], min_active: 2, topk_choices: [1, 2, 4]}}
optim: {{lr: 1.0e-3, lr_scheduler: constant}}
trainer:
  project_name: p
  experiment_name: tiny
  total_epochs: 3
  logger: [console]
  checkpoint: {{save_contents: [model, optimizer, extra, hf_model], export: {{dtype: fp32}}}}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.data import write_questions
    from tests.helpers.vlms import write_model

    directory = tmp_path_factory.mktemp("inputs")
    model, questions = write_model(directory / "model"), write_questions(directory / "questions", 16, 4)
    (directory / "recipe.yaml").write_text(RECIPE.format(questions=questions, model=model))
    return directory


def losses(inputs: Path, run_dir: Path, num_ranks: int, *overrides: str) -> dict[tuple[int, str], float]:
    """Train to the end; training and validation losses by step."""
    run = RecipeRun("run_sft.sh", inputs / "recipe.yaml", run_dir, *overrides, num_ranks=num_ranks)
    run.finish()
    return {(row["step"], name): row[name] for row in run.rows() for name in ("train/loss", "val/loss") if name in row}


def logits_of(adapter: VLMAdapter) -> torch.Tensor:
    import torch

    from tests.helpers.data import row
    from verl_ext.data.image_questions import question_of

    question = question_of("tiny", 0, row(0), "", None)
    with torch.no_grad():
        return adapter.prefill(adapter.inputs(question.load_image(), question.question, 2)).logits


def test_two_ranks_learn_the_same_as_one(inputs: Path, tmp_path: Path) -> None:
    import torch

    from verl_ext.controller.vlm import load_adapter

    alike = ("configurations.share=0.0", "configurations.tier_weights=[0.0,0.0,1.0]")  # for each micro-batch
    found = [losses(inputs, tmp_path / str(ranks), ranks, *alike) for ranks in (1, 2)]
    assert found[0].keys() == found[1].keys() and len(found[0]) == NUM_STEPS + 2
    for key, loss in found[0].items():
        assert found[1][key] == pytest.approx(loss, rel=1e-3), key
    assert found[0][NUM_STEPS, "val/loss"] < found[0][0, "val/loss"]
    exports = [tmp_path / str(ranks) / f"global_step_{NUM_STEPS}" / "huggingface" for ranks in (1, 2)]
    one, two = (logits_of(load_adapter(str(export), TIERS)) for export in exports)
    torch.testing.assert_close(one, two, rtol=0, atol=0.05)
    start = logits_of(load_adapter(str(inputs / "model"), TIERS))
    assert float((one - start).abs().max()) > 0.5


def test_only_executed_blocks_learn(inputs: Path, tmp_path: Path) -> None:
    import torch

    from verl_ext.controller.space import ConfigurationSpace
    from verl_ext.controller.vlm import load_adapter
    from verl_ext.trainer.stages import load_config
    from verl_ext.trainer.vlm_sft import VLMSFTTrainer

    overrides = ["configurations.share=1.0", "data.train_batch_size=2", "data.micro_batch_size_per_gpu=1"]
    overrides += ["trainer.total_training_steps=1", "optim.lr_warmup_steps_ratio=0.0", f"trainer.seed={SEED}"]
    losses(inputs, tmp_path / "run", 2, *overrides)
    trainer = VLMSFTTrainer.__new__(VLMSFTTrainer)  # only what chooses a configuration
    trainer.config = load_config("sft", [f"recipe={inputs / 'recipe.yaml'}", *overrides])
    trainer.global_step, trainer.space = 1, ConfigurationSpace(("low", "medium", "high"), 4, 2, 4, (1, 2, 4))
    ran = trainer.configuration(0).blocks
    export = tmp_path / "run" / "global_step_1" / "huggingface"
    before, after = (load_adapter(str(path), TIERS).blocks for path in (inputs / "model", export))
    changed = [
        any(not torch.equal(old, new) for old, new in zip(a.parameters(), b.parameters(), strict=True))
        for a, b in zip(before, after, strict=True)
    ]
    assert changed == list(ran) != [True] * 4  # one micro-batch on each rank, and one configuration for both


def test_bad_input_is_reported_once(inputs: Path, tmp_path: Path) -> None:
    done = RecipeRun(
        "run_sft.sh", inputs / "recipe.yaml", tmp_path / "run", "configurations.topk_choices=[1,2]"
    ).start()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "topk_choices" in error and "must end with 4" in error
