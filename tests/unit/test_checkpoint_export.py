"""When a save has an export, and that the shards are enough to make one later."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.command.export import run

pytestmark = pytest.mark.usefixtures("one_rank")
EVERYTHING = "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
SHARDS = "trainer.checkpoint.save_contents=[model,optimizer,extra]"


def test_adapters_are_merged_also_where_training_wrote_no_export(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path, SHARDS, "model.lora_rank=4", "optim.lr=1e-2"))
    for _, batch in zip(range(2), trainer.remaining_batches(), strict=False):
        trainer.training_step(batch)
    trainer.save_checkpoint(2)
    assert not list(tmp_path.glob("global_step_2/huggingface/*.safetensors"))
    target = tmp_path / "model"
    options = {"run_dir": tmp_path / "global_step_2", "step": None, "output": target}
    assert run(Namespace(**options, dtype="fp32", max_shard_gib=1.0)) == 0
    assert f"eval_pipeline/run.sh run --checkpoint {target}\n" in capsys.readouterr().out
    merged, base = load_file(target / "model.safetensors"), load_file(quickstart / "model/model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name].float())}
    assert any("q_proj.weight" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)


def test_an_export_is_only_as_frequent_as_asked(quickstart: Path, tmp_path: Path) -> None:
    overrides = (EVERYTHING, "trainer.save_freq=1", "trainer.checkpoint.export.every=2")
    trainer = make_trainer(
        small_config(quickstart, tmp_path, *overrides, "trainer.checkpoint.export.max_shard_gib=0.001")
    )
    for step in (1, 2):
        trainer.save_checkpoint(step)
    with_weights = {path.parents[1].name for path in tmp_path.glob("*/huggingface/*.safetensors")}
    assert with_weights == {"global_step_2"}
    assert (tmp_path / "global_step_1/huggingface/tokenizer.json").exists()
    assert len(list((tmp_path / "global_step_2/huggingface").glob("model-*-of-*.safetensors"))) > 2
