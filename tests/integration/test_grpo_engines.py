"""Engines draw from the updated weights: on two ranks, with tied embeddings and LoRA, on prompts of several blocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

STEPS = 3


@pytest.mark.parametrize("kind", ["plain", "tied", "lora"])
def test_engines_follow_the_weights(kind: str, quickstart: Path, tmp_path: Path) -> None:
    """Every token of every draw has the probability that the updated model gives it; both engines draw the same."""
    model = tmp_path / "model"
    shutil.copytree(quickstart / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": kind == "tied"}))
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(Path(__file__).with_name("engines_on_ranks.py")), str(model), kind, str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *script], check=True, env=environment, timeout=600)
    for results in json.loads(output.read_text()):
        assert len(results) == STEPS
        for result in results:
            assert result["buckets"] > 2
            for engine in ("vllm", "hf"):
                for temperature in (0.0, 0.8):
                    assert result[f"{engine} {temperature}"] < 1e-4, result
                    assert result[f"{engine} {temperature} repeats"], result
            # by the same random numbers, and but for a rounding beside one of them the same probabilities
            assert result["same 0.0"] == result["same 0.8"] == 8, result
            assert result["different 0.8"] > 4, "draws of one prompt are not drawn by their own seeds"
