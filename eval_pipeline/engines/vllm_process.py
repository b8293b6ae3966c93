"""The child process that runs vLLM; `vllm_engine.py` starts it. Importing this module does not import vLLM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import GeneratedAnswer, GenerateRequest, ModelRefused, request_seed
from eval_pipeline.engines.vllm_engine import FinishedAnswer, Generate, GenerateDone, ModelLoaded, VllmFailed
from verl_ext.cli import child_process_args
from verl_ext.commands import program, require_package
from verl_ext.errors import STOP_SIGNALS, UserError, first_line_of
from verl_ext.model_files import config_of
from verl_ext.processes import defer_gc
from verl_ext.rendering import EndlessTemplate, rendering
from verl_ext.vllm_setup import (
    is_memory_error,
    pick_vllm_dtype,
    prepare_vllm_environment,
    require_vllm_arguments,
    safe_vllm_arguments,
    small_model_arguments,
)

if TYPE_CHECKING:
    from vllm import RequestOutput

HEARTBEAT_S = 1.0
"""Interval of heartbeats; shorter if the owner's time limit is less than four times this."""
DEFAULT_MAX_NUM_SEQS = 1024
"""vLLM's default on GPUs of 70 GiB or more; smaller ones have a lower one."""
CPU_NICENESS = 5
"""Niceness on a CPU, so that the judge and training on the same cores have priority. With a higher value, rotation
might remove checkpoints before they are evaluated."""


def main(descriptor: int, owner: int) -> None:
    """Load a model and generate until the owner closes the connection or dies.

    Args:
        descriptor: file descriptor of the connection to the owner.
        owner: process id of the owner.
    """
    os.set_inheritable(descriptor, False)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals every process; the owner decides when this one ends
    threading.Thread(target=_exit_with_owner, args=(owner,), daemon=True).start()
    serve_until_owner_leaves(Connection(descriptor))


def serve_until_owner_leaves(connection: Connection) -> None:
    """Load the model and generate until the owner closes the connection.

    Raises:
        Exception: anything that vLLM raises, after a message to the owner.
    """
    try:
        _serve(connection)
    except Exception as error:
        # the pipes of vLLM's own processes break with the same errors as the connection
        if isinstance(error, (EOFError, BrokenPipeError, ConnectionResetError)) and _owner_has_left(connection):
            return
        if not _has_lost_process(error):
            with suppress(OSError):
                connection.send(VllmFailed(f"{type(error).__name__}: {first_line_of(error)}"))
        raise


def _has_lost_process(error: Exception) -> bool:
    """Whether one of vLLM's own processes ended or hangs; only the log says why."""
    is_generic = str(error) in ("Executor failed.", "cancelled") or isinstance(error, TimeoutError)
    return is_generic or type(error).__name__ == "EngineDeadError"


def _owner_has_left(connection: Connection) -> bool:
    try:
        while connection.poll():
            connection.recv()
    except (EOFError, OSError):
        return True
    return False


def _exit_with_owner(owner: int) -> None:
    # a killed owner cannot end this process, which would keep the model in memory forever
    import psutil

    if os.getppid() == owner:
        with suppress(psutil.NoSuchProcess):  # it has just died
            psutil.Process(owner).wait()
    os._exit(1)


def _serve(connection: Connection) -> None:
    load = connection.recv()
    try:
        model = VllmModel(load.config, load.model)
    except UserError as error:
        connection.send(error)
        return
    with closing(model):
        connection.send(ModelLoaded(model.protocol, model.seconds))
        while True:
            message = connection.recv()
            if isinstance(message, Generate):  # an Abort may arrive after the last answer
                try:
                    _generate(connection, model, message, min(HEARTBEAT_S, load.config.timeout_s / 4))
                except UserError as error:
                    connection.send(error)


def _generate(connection: Connection, model: VllmModel, work: Generate, heartbeat_s: float) -> None:
    started = last_sent = time.monotonic()
    steps = model.generate(work.requests, work.sampling)
    for finished in steps:
        # not in a thread, because even an empty list must mean that a step was completed
        if finished or time.monotonic() - last_sent >= heartbeat_s:
            connection.send(finished)
            last_sent = time.monotonic()
        if connection.poll():
            connection.recv()  # Abort, or EOFError
            steps.close()
            break
    connection.send(GenerateDone(time.monotonic() - started))


class VllmModel:
    """A model loaded into vLLM.

    Args:
        model: Hugging Face model directory with a chat template.

    Raises:
        UserError: vLLM is not installed, or the model or the configuration cannot be used; a `ModelRefused` if a retry
            cannot succeed.
    """

    def __init__(self, config: EngineConfig, model: str) -> None:
        require_package("vllm")
        started = time.monotonic()
        with defer_gc():
            device = prepare_vllm_environment()
            if device == "cpu":
                _lower_priority()
            from vllm import LLM, __version__

        imported = time.monotonic()
        self._template_kwargs = config.chat_template_kwargs
        self._renders_system = False  # whether the chat template has rendered a system message
        try:
            self._llm = LLM(**vllm_arguments(config, model, on_gpu=device != "cpu"))
        except UserError as error:
            raise ModelRefused(str(error)) from error
        except Exception as error:  # vLLM, transformers and safetensors share no exception class
            traceback.print_exc(file=sys.stderr)
            # vLLM checks the model's and its own configuration before it starts a process
            is_configuration = isinstance(error, ValueError) and not is_memory_error(error)
            kind = ModelRefused if is_configuration else UserError
            raise kind(f"vLLM cannot load {model} ({_reason(error)}); fix the model or the engine settings") from error
        self._require_template(model)
        self._require_generation(model)
        self.seconds = {"import_s": imported - started, "load_s": time.monotonic() - imported}
        self.protocol = self._describe(device, __version__, config.vllm)

    def _require_template(self, model: str) -> None:
        from jinja2 import TemplateError

        try:
            self._tokenize([{"role": "user", "content": "any"}])
        except (TemplateError, EndlessTemplate) as error:
            raise ModelRefused(
                f"{model} has no working chat template ({first_line_of(error)}); add one as chat_template.jinja"
            ) from error

    def _require_generation(self, model: str) -> None:
        """Generate two tokens, because some kernels refuse a model only when they run."""
        try:
            list(self.generate([GenerateRequest("any", "any")], SamplingConfig(max_tokens=2)))
        except Exception as error:  # vLLM and its kernels share no exception class
            may_pass = _has_lost_process(error) or is_memory_error(error) or "CUDA error" in str(error)
            kind = UserError if may_pass else ModelRefused
            raise kind(
                f"vLLM loads {model} but cannot run it ({_reason(error)}); change the model or the engine settings"
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

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Generator[list[FinishedAnswer], None, None]:
        """Answer every request.

        Yields:
            A list of finished answers after each added request, and then after each step of the engine. Requests that
            cannot be answered come first. Closing the generator aborts the rest.

        Raises:
            ModelRefused: the chat template cannot render a prompt.
        """
        engine = self._llm.llm_engine
        # entries of an earlier call would change how prompts are split into steps, and with it the last bits of logits
        engine.reset_prefix_cache()
        try:
            for index, request in enumerate(requests):
                refused = self._add(index, request, sampling)
                yield [] if refused is None else [(index, refused)]
            while engine.has_unfinished_requests():
                yield [(int(output.request_id), _answer_from(output)) for output in engine.step() if output.finished]
        finally:
            engine.abort_request([str(index) for index in range(len(requests))])

    def _add(self, index: int, request: GenerateRequest, sampling: SamplingConfig) -> GeneratedAnswer | None:
        """Add a request to the engine; returns a failed answer if the request cannot be answered."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        limit = self._llm.llm_engine.model_config.max_model_len
        tokens = self._render(request)
        if len(tokens) >= limit:
            return GeneratedAnswer.failed(
                f"the prompt has {len(tokens)} tokens, but the model takes {limit} including the answer"
            )
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_tokens, limit - len(tokens)),
            seed=request_seed(request, sampling),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            self._llm.llm_engine.add_request(str(index), {"prompt_token_ids": tokens}, params)
        except ValueError as error:
            return GeneratedAnswer.failed(f"vLLM rejects the prompt: {first_line_of(error)}")
        return None

    def _render(self, request: GenerateRequest) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ModelRefused: the chat template refuses the prompt, or omits its system message.
        """
        from jinja2 import TemplateError

        try:
            tokens = self._tokenize(request.messages)
            if not self._renders_system and request.messages[0]["role"] == "system":
                other = {"role": "system", "content": f"Not {request.messages[0]['content']}"}
                self._renders_system = self._tokenize([other, *request.messages[1:]]) != tokens
                if not self._renders_system:
                    raise ModelRefused(
                        f"the model's chat template omits the system message of {request.problem_id}; remove it, or "
                        "put it into the user's message"
                    )
        except (TemplateError, EndlessTemplate) as error:
            raise ModelRefused(
                f"the model's chat template refuses the prompt of {request.problem_id} ({first_line_of(error)}); "
                "remove its system message or earlier turns, or put them into the user's message"
            ) from error
        return tokens

    def _tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        with rendering():
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **self._template_kwargs
            )
        return list(tokens)

    def close(self) -> None:
        """End everything that vLLM started."""
        self._llm.llm_engine.engine_core.shutdown()


def _answer_from(output: RequestOutput) -> GeneratedAnswer:
    completion = output.outputs[0]
    return GeneratedAnswer(completion.text, len(completion.token_ids), truncated=completion.finish_reason == "length")


def _lower_priority() -> None:
    """Lower the priority of this thread, the threads that it starts, and the session.

    If the kernel divides CPU time among sessions first, niceness counts only within a session (sched(7), autogroup).
    """
    os.nice(CPU_NICENESS)
    with suppress(OSError):  # the kernel has no autogroups, or the file cannot be written, which only costs speed
        Path("/proc/self/autogroup").write_text(str(CPU_NICENESS))


def vllm_arguments(config: EngineConfig, model: str, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM.

    Args:
        model: Hugging Face model directory.
        on_gpu: whether vLLM runs on a GPU.

    Raises:
        UserError: an argument is unknown, vLLM does not support the dtype for the model, or the model needs custom
            code.
    """
    from vllm import EngineArgs

    require_vllm_arguments(config.vllm, "engine.vllm")
    num_seqs = config.vllm.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
    wanted = {
        "enforce_eager": not on_gpu,
        **(small_model_arguments(config_of(model), config.max_model_len, num_seqs) if on_gpu else {}),
        "seed": 0,
        "use_tqdm_on_load": False,
        # vLLM 0.12 rewinds a request's random state after each prompt chunk, which a CPU generator does not support
        "enable_chunked_prefill": None if on_gpu else False,
        **config.vllm,
        "model": model,
        "dtype": config.dtype,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    arguments = safe_vllm_arguments(wanted)
    # vLLM's own parser knows every way to specify a length, including scaled positions
    model_config = EngineArgs(**arguments).create_model_config()
    dtype = pick_vllm_dtype(config.dtype, on_gpu, model_config.hf_text_config.dtype)
    if not on_gpu and "linear_attention" in (getattr(model_config.hf_text_config, "layer_types", None) or ()):
        if config.dtype not in ("auto", "bfloat16"):
            raise UserError(
                f"{model} has linear attention, which vLLM computes only in bfloat16 on a CPU; set engine.dtype=auto"
            )
        dtype = "bfloat16"
        arguments = {"enable_prefix_caching": False, **arguments}  # caching states needs chunked prefill
    return {**arguments, "dtype": dtype, "max_model_len": min(model_config.max_model_len, config.max_model_len)}


def _reason(error: Exception) -> str:
    """vLLM's error message in one line."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return first_line_of(error)
    first = error.errors()[0]
    complaint = first["msg"].splitlines()[0].removeprefix("Value error, ")
    return f"{complaint} ({'.'.join(map(str, first['loc'])) or error.title})"


if __name__ == "__main__":
    words = child_process_args(
        "eval_pipeline.engines.vllm_process",
        "Runs vLLM for an evaluation.",
        f"{program('eval')} run --checkpoint models/mine",
        "descriptor",
        "owner",
    )
    main(*map(int, words))
