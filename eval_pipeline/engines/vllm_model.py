"""A model in vLLM, answering step by step. Runs in the process of `vllm_process.py`; importing it imports no vLLM."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.seeds import seed_of
from eval_pipeline.engines.vllm_arguments import arguments_for, reason_of
from verl_ext.commands import require_package
from verl_ext.errors import UserError, first_line_of
from verl_ext.processes import defer_gc
from verl_ext.rendering import EndlessTemplate, rendering
from verl_ext.vllm_setup import prepare_vllm_environment

if TYPE_CHECKING:
    from vllm import RequestOutput

Finished = list[tuple[int, Answer]]
CPU_NICENESS = 5
"""Of the process on a CPU: a training on the same cores, and the judging of what was answered, go first. Not more,
for a checkpoint that waits long may be rotated away before it is evaluated."""


def _step_back() -> None:
    """Let others on the same cores go first: this thread with those that it starts, and their session.

    Where a kernel shares processor time among sessions first, niceness counts only within one (sched(7), autogroup).
    """
    os.nice(CPU_NICENESS)
    with suppress(OSError):  # a kernel without them; and a session that stays as it was costs speed alone
        Path("/proc/self/autogroup").write_text(str(CPU_NICENESS))


class VllmModel:
    """A loaded model.

    Args:
        settings: of the engine.
        model: Hugging Face model directory with a chat template.

    Raises:
        UserError: vLLM is not installed, or the model or the settings cannot be used.
    """

    def __init__(self, settings: EngineConfig, model: str) -> None:
        require_package("vllm")
        started = time.monotonic()
        with defer_gc():
            device = prepare_vllm_environment()
            if device == "cpu":
                _step_back()
            from vllm import LLM, __version__

        imported = time.monotonic()
        try:
            arguments = arguments_for(settings, model, on_gpu=device != "cpu")
            self._llm = LLM(**arguments)
        except UserError:
            raise
        except Exception as error:  # vLLM, transformers and safetensors have no exception in common
            traceback.print_exc(file=sys.stderr)
            raise UserError(
                f"vLLM cannot load {model} ({reason_of(error)}); fix the model or the engine settings"
            ) from error
        self._require_template(model)
        self.seconds = {"import_s": imported - started, "load_s": time.monotonic() - imported}
        self.protocol = self._describe(device, __version__, settings.vllm)

    def _require_template(self, model: str) -> None:
        from jinja2 import TemplateError

        try:
            self._tokens_of("any")
        except (TemplateError, EndlessTemplate) as error:
            raise UserError(
                f"{model} has no working chat template ({first_line_of(error)}); add one as chat_template.jinja"
            ) from error

    def _describe(self, device: str, version: str, further: dict[str, Any]) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "engine": f"vllm {version}",
            "device": device,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "vllm": further,
        }

    def answer(self, requests: Sequence[Request], sampling: SamplingConfig) -> Generator[Finished, None, None]:
        """Answer every request.

        Yields:
            After each prompt that was taken up, and then after each step of the engine, what was finished in it, by the
            request's index; what cannot be answered at all comes first. Closing the iterator drops what is under way.
        """
        engine = self._llm.llm_engine
        # what an earlier call left there would change how prompts are cut into steps, and so the last bits of logits
        engine.reset_prefix_cache()
        try:
            for index, request in enumerate(requests):
                refused = self._add(index, request, sampling)
                yield [] if refused is None else [(index, refused)]
            while engine.has_unfinished_requests():
                yield [(int(output.request_id), _read(output)) for output in engine.step() if output.finished]
        finally:
            engine.abort_request([str(index) for index in range(len(requests))])

    def _add(self, index: int, request: Request, sampling: SamplingConfig) -> Answer | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        limit = self._llm.llm_engine.model_config.max_model_len
        tokens = self._tokens_of(request.prompt)
        if len(tokens) >= limit:
            return _no_answer(f"the prompt has {len(tokens)} tokens and the model takes {limit}, answer included")
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_tokens, limit - len(tokens)),
            seed=seed_of(request, sampling),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            self._llm.llm_engine.add_request(str(index), {"prompt_token_ids": tokens}, params)
        except ValueError as error:
            return _no_answer(f"vLLM refuses the prompt: {first_line_of(error)}")
        return None

    def _tokens_of(self, prompt: str) -> list[int]:
        chat, tokenizer = [{"role": "user", "content": prompt}], self._llm.get_tokenizer()
        with rendering():
            return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    def close(self) -> None:
        """End what vLLM started."""
        self._llm.llm_engine.engine_core.shutdown()


def _read(output: RequestOutput) -> Answer:
    completion = output.outputs[0]
    return Answer(completion.text, len(completion.token_ids), truncated=completion.finish_reason == "length")


def _no_answer(reason: str) -> Answer:
    return Answer("", 0, False, error=reason)
