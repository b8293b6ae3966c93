"""Inference engines: vLLM in a child process, or a running server with the OpenAI protocol."""

from __future__ import annotations

from pathlib import Path

from eval_pipeline.config import EngineConfig
from eval_pipeline.engines.base import Engine
from verl_ext.errors import UserError


def open_engine(config: EngineConfig, export: Path | None) -> Engine:
    """Create the configured engine, without starting it.

    Args:
        config: of the engine.
        export: Hugging Face model directory; None takes the server's model. If given, the server must have loaded it.

    Raises:
        UserError: vLLM needs a model.
    """
    if config.kind == "openai":
        from eval_pipeline.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(config, export)
    if export is None:
        raise UserError(
            "engine.kind=vllm needs a model; name a checkpoint, or set engine.kind=openai to use a running server"
        )
    from eval_pipeline.engines.vllm_engine import VllmEngine

    return VllmEngine(config, export)
