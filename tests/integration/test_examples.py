"""The example of a recipe trains, watched by the example of a health rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

RULES = "examples/new_health_rule/memory.py:RULES"


def test_the_recipe_trains_and_the_rule_is_known(tmp_path: Path) -> None:
    text = (ROOT / "examples/new_recipe/conversions.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("data/examples", str(tmp_path)))
    command = ["bash", str(ROOT / "run_sft.sh"), "1", "recipe=mine.yaml", f"trainer.default_local_dir={tmp_path}/run"]
    command += ["trainer.total_training_steps=2", f"health.rules=[{RULES}]", "health.stop_on=[memory_growing]"]
    environment = {**os.environ, "VERL_EXT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    assert (tmp_path / "run/global_step_2/huggingface/model.safetensors").is_file()
    look = [sys.executable, "-m", "verl_ext.health", str(tmp_path / "run"), "--own-rules", RULES]
    looked = subprocess.run(look, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert looked.returncode == 0 and "too little to tell" in looked.stdout, looked.stderr
    assert "memory_growing" in looked.stdout
