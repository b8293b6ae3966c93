"""`run_sft.sh` with a recipe of the stage vlm_sft: it learns, on any number of ranks, also with blocks left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.data import row, write_questions
from tests.helpers.vlms import write_model
from tests.integration.test_budget_command import ENVIRONMENT, TIMEOUT_S
from verl_ext.config.compose import compose_config
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.configuration import ConfigurationSpace
from verl_ext.controller.loading import load_adapter
from verl_ext.data.questions import question_of
from verl_ext.metrics.jsonl import read_metrics
from verl_ext.trainer.vlm_sft import VLMSFTTrainer

TIERS = (256, 1024, 4096)
NUM_STEPS = 6
SEED = 7
"""With which two blocks are left out of the first micro-batch."""
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
    directory = tmp_path_factory.mktemp("inputs")
    model, questions = write_model(directory / "model"), write_questions(directory / "questions", 16, 4)
    (directory / "recipe.yaml").write_text(RECIPE.format(questions=questions, model=model))
    return directory


def losses(inputs: Path, run_dir: Path, ranks: int, *overrides: str) -> dict[tuple[int, str], float]:
    words = ["bash", str(ROOT / "run_sft.sh"), str(ranks), f"recipe={inputs / 'recipe.yaml'}"]
    words += [f"trainer.default_local_dir={run_dir}", *overrides]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(run_dir / "metrics.jsonl")
    return {(row["step"], name): row[name] for row in rows for name in ("train/loss", "val/loss") if name in row}


def logits_of(adapter: VLMAdapter) -> torch.Tensor:
    question = question_of("tiny", 0, row(0), "", None)
    with torch.no_grad():
        return adapter.begin(adapter.inputs(question.opened(), question.question, 2)).logits


def test_ranks_learn_together_what_one_learns(inputs: Path, tmp_path: Path) -> None:
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


def test_blocks_that_do_not_run_learn_nothing_and_the_others_do(inputs: Path, tmp_path: Path) -> None:
    overrides = ["configurations.share=1.0", "data.train_batch_size=2", "data.micro_batch_size_per_gpu=1"]
    overrides += ["trainer.total_training_steps=1", "optim.lr_warmup_steps_ratio=0.0", f"trainer.seed={SEED}"]
    losses(inputs, tmp_path / "run", 2, *overrides)
    trainer = VLMSFTTrainer.__new__(VLMSFTTrainer)  # as much of one as draws a configuration
    trainer.config = compose_config("sft", [f"recipe={inputs / 'recipe.yaml'}", *overrides])
    trainer.global_step, trainer.space = 1, ConfigurationSpace(("low", "medium", "high"), 4, 2, 4, (1, 2, 4))
    ran = trainer.configuration(0).blocks
    export = tmp_path / "run" / "global_step_1" / "huggingface"
    before, after = (load_adapter(str(path), TIERS).blocks for path in (inputs / "model", export))
    changed = [
        any(not torch.equal(old, new) for old, new in zip(a.parameters(), b.parameters(), strict=True))
        for a, b in zip(before, after, strict=True)
    ]
    assert changed == list(ran) != [True] * 4  # one micro-batch on each rank, and one configuration for both


def test_bad_input_is_one_sentence(inputs: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "verl_ext.launch", "sft", "1", f"recipe={inputs / 'recipe.yaml'}"]
    words += [f"trainer.default_local_dir={tmp_path / 'run'}", "configurations.topk_choices=[1,2]"]
    done = subprocess.run(words, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2 and "must end with 4" in done.stderr and "Traceback" not in done.stderr
