"""vLLM runs no code that a model brings unless it is told to, whatever vLLM itself thinks of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.evaluation import ENVIRONMENT
from tests.helpers.models import make_model, make_tokenizer, save

SCRIPT = """
import sys
from pathlib import Path
from eval_pipeline.engines.settings import EngineSettings
from eval_pipeline.engines.vllm_arguments import arguments_for
marker, *models = map(Path, sys.argv[1:])
for model in models:
    try:
        told = arguments_for(EngineSettings(dtype="float32"), str(model), on_gpu=False)["max_model_len"]
    except Exception as error:
        told = "refused: " + " ".join(str(error).split())
    print(model.name, "RAN CODE" if marker.exists() else "ran none", told)
trusting = EngineSettings(dtype="float32", vllm={"trust_remote_code": True})
try:
    arguments_for(trusting, str(models[0]), on_gpu=False)
except Exception:
    pass  # the planted class is none that vLLM could serve
print("trusted", "RAN CODE" if marker.exists() else "ran none")
"""


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A model of an architecture of its own, and one that vLLM knows; both name code, which leaves a mark."""
    tokenizer = make_tokenizer()
    known = save(tmp_path / "known", make_model(tokenizer), tokenizer)
    (known / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'planted')!r}).mkdir(exist_ok=True)\n"
        "from transformers import Qwen2ForCausalLM as Planted\n"
    )
    config = json.loads((known / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "planted.Planted", "AutoModelForCausalLM": "planted.Planted"}
    (known / "config.json").write_text(json.dumps(config))
    own = Path(shutil.copytree(known, tmp_path / "own"))
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["Planted"]}))
    return [own, known]


def test_vllm_runs_code_on_request_alone(models: list[Path], tmp_path: Path) -> None:
    """CVE-2026-22807: vLLM 0.12 itself imports what auto_map names."""
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "planted"), *map(str, models)]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("own", "known", "trusted"))]
    assert len(lines) == 3, done.stderr
    assert lines[0].startswith("own ran none refused: ") and "not supported" in lines[0]
    assert lines[1:] == ["known ran none 96", "trusted RAN CODE"]
