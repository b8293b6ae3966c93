"""Prints as JSON which arguments vLLM gets.

Arguments: the model's directory, a mark, two models that bring code, and a model with linear attention. The code of the
models creates the mark, if it is run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from eval_pipeline.config import EngineConfig
from eval_pipeline.engines.vllm_process import vllm_arguments
from eval_pipeline.recipe import load_eval_config
from verl_ext import vllm_setup
from verl_ext.errors import UserError

KEYS = {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 2, "max_model_len": 64, "dtype": "float16"}


def main(export: str, mark: str, own: str, known: str, linear: str) -> None:
    """Print a value for each name."""
    overrides = [*(f"engine.{key}={value}" for key, value in KEYS.items()), "engine.vllm.max_num_seqs=7"]
    default = load_eval_config("quickstart", []).engine
    report: dict[str, Any] = {
        "overridden": vllm_arguments(load_eval_config("quickstart", overrides).engine, export, on_gpu=True),
        "cpu": vllm_arguments(default, export, on_gpu=False),
        "linear": vllm_arguments(EngineConfig(), linear, on_gpu=False),
    }
    for name, has_bf16 in (("gpu", True), ("gpu before Ampere", False)):
        with patch.object(vllm_setup, "gpu_has_bf16", lambda answer=has_bf16: answer):
            report[name] = vllm_arguments(default, export, on_gpu=True)
    try:
        vllm_arguments(EngineConfig(dtype="float32"), linear, on_gpu=False)
    except UserError as error:
        report["linear in float32"] = str(error)
    for name, model, trusted in (("own", own, False), ("known", known, False), ("trusted", own, True)):
        vllm = {"trust_remote_code": True} if trusted else {}
        try:
            value = vllm_arguments(EngineConfig(dtype="float32", vllm=vllm), model, on_gpu=False)["max_model_len"]
        except Exception as error:  # vLLM raises many types
            value = "refused: " + " ".join(str(error).split())
        report[name] = {"ran_code": Path(mark).exists(), "max_model_len": value}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
