"""The example recipe trains under the example health rule."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import ROOT, commands
from tests.helpers.commands import RecipeRun

RULES = "examples/new_health_rule/memory.py:RULES"


def test_example_recipe_trains_and_its_rule_is_known(tmp_path: Path) -> None:
    text = (ROOT / "examples/new_recipe/conversions.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("data/examples", str(tmp_path)))
    overrides = ("trainer.total_training_steps=2", f"health.rules=[{RULES}]", "health.stop_on=[memory_growing]")
    run = RecipeRun("run_sft.sh", "mine.yaml", tmp_path / "run", *overrides, cwd=tmp_path)
    run.finish()
    assert run.record()["status"] == "finished"
    assert (run.run_dir / "global_step_2/huggingface/model.safetensors").is_file()
    report = commands.python("verl_ext.health", run.run_dir, "--extra-rules", RULES)
    assert report.returncode == 0, report.stderr
    assert "memory_growing" in report.stdout
