"""Engine settings and seeds, and the process that runs vLLM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import (
    EngineDied,
    GenerateRequest,
    ModelRefused,
    request_seed,
    vllm_engine,
    vllm_process,
)
from eval_pipeline.engines.vllm_engine import (
    Abort,
    Generate,
    GenerateDone,
    LoadModel,
    ModelLoaded,
    VllmChild,
    VLLMEngine,
    VllmFailed,
)
from eval_pipeline.engines.vllm_process import VllmModel
from eval_pipeline.worker import open_engine
from tests.helpers import ROOT
from tests.helpers.models import make_tokenizer
from verl_ext.errors import UserError, first_line_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "openai"}, "set engine.base_url=http"),
        ({"kind": "openai", "base_url": "localhost:8000"}, "needs the server's URL"),
        ({"kind": "openai", "base_url": "http://[::1/v1"}, "is not a URL"),
        ({"kind": "openai", "base_url": "http://me:pass@host/v1"}, "must not hold credentials"),
        ({"api_key_env": "sk-12345"}, "engine.api_key_env is not a variable name"),
        ({"vllm": {"dtype": "half"}}, "set engine.dtype"),
        ({"vllm": {"hf_token": "hf_12345"}}, "environment variable HF_TOKEN"),
    ],
)
def test_invalid_engine_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        EngineConfig(**settings).check()
    assert "12345" not in str(error.value) and "pass@" not in str(error.value)


def test_vllm_without_model_is_rejected() -> None:
    with pytest.raises(UserError, match="specify a checkpoint"):
        open_engine(EngineConfig(), None)


def test_seeds_depend_on_request_only() -> None:
    sampling = SamplingConfig(temperature=1.0, seed=5)
    seeds = [request_seed(GenerateRequest(f"p{i}", "x", sample), sampling) for i in range(50) for sample in range(4)]
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(GenerateRequest("p0", "another prompt"), sampling) == seeds[0]
    assert request_seed(GenerateRequest("p0", "x"), SamplingConfig(temperature=1.0, seed=6)) != seeds[0]
    assert request_seed(GenerateRequest("p0", "x"), SamplingConfig()) is None
    # the same on every machine and from one release to the next
    assert request_seed(GenerateRequest("HumanEval/0", "x"), SamplingConfig(temperature=0.8)) == 1399759359


def test_client_modules_import_no_heavy_packages() -> None:
    modules = [f"eval_pipeline.engines.{path.stem}" for path in Path(ROOT / "eval_pipeline/engines").glob("*.py")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(process.stdout.split())
    assert set(modules) <= imported and not {"torch", "vllm", "openai", "transformers"} & imported


def test_concurrent_close_ends_child_once() -> None:
    child, failures = VllmChild(timeout_s=60), []
    together = threading.Barrier(8)

    def run(work: Callable[[], object]) -> None:
        together.wait()
        try:
            work()
        except EngineDied:
            pass  # the child has ended, which every reader may see
        except BaseException as error:
            failures.append(error)

    work = [child.end, child.receive] * 4
    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not psutil.pid_exists(child.pid)


@contextmanager
def child_process() -> Iterator[VllmChild]:
    child = VllmChild(timeout_s=60)
    try:
        yield child
    finally:
        child.end()


def test_exception_in_child_is_reported_without_traceback() -> None:
    with child_process() as child:
        child.send(Abort())  # not a model
        with pytest.raises(EngineDied) as died:
            child.receive()
    assert str(died.value) == "vLLM failed (AttributeError: 'Abort' object has no attribute 'config')"


@pytest.mark.parametrize("message", [VllmFailed("check the stack trace above"), UserError("See stack trace for more")])
def test_error_that_refers_to_log_comes_with_its_last_lines(message: object) -> None:
    """With tensor parallelism, vLLM's workers write the reason of a failure only to their log."""
    with child_process() as child:
        child._log.write(b"torch.OutOfMemoryError\n")
        child._connection.close()
        child._connection, theirs = Pipe()
        theirs.send(message)
        try:
            shown = str(child.receive())
        except EngineDied as died:
            shown = str(died)
    assert "stack trace" in shown and shown.endswith("its last lines:\ntorch.OutOfMemoryError")


def test_child_killed_by_others_may_be_out_of_memory() -> None:
    with child_process() as child:
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"SIGKILL, possibly out of memory\)$"):  # it has printed nothing
            child.receive()


def test_child_killed_by_owner_is_not_called_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/bash\necho loading\neval "exec $3>&-"\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(vllm_engine, "DEATH_TIMEOUT_S", 0.1)
    with child_process() as child, pytest.raises(EngineDied, match="without exiting and was killed") as died:
        child.receive()
    assert str(died.value).endswith("; its last lines:\nloading")
    assert "memory" not in str(died.value) and "SIGKILL" not in str(died.value)


def test_child_that_hangs_at_load_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/bash\nexec sleep infinity\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    engine = VLLMEngine(EngineConfig(load_timeout_s=0.1), tmp_path)
    with pytest.raises(EngineDied, match=r"did not load the model within 0.1 s \(engine.load_timeout_s\) and was kill"):
        engine.__enter__()
    assert not psutil.pid_exists(engine._child.pid)


def test_loading_may_exceed_step_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_process() as child, monkeypatch.context() as patched:
        polls = iter([False] * 70 + [True])  # one per second
        patched.setattr(child, "_connection", Mock(poll=lambda _: next(polls), recv=lambda: "loaded"))
        assert child.receive(load_timeout_s=80) == "loaded"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Unsupported CPU attention configuration: head_dim=16\nframes"), ModelRefused),
        (RuntimeError("CUDA out of memory"), UserError),
        (RuntimeError("CUDA error: unspecified launch failure"), UserError),
        (type("EngineDeadError", (Exception,), {})("EngineCore encountered an issue"), UserError),
        (RuntimeError("Executor failed."), UserError),
        (TimeoutError("RPC call to execute_model timed out."), UserError),
    ],
)
def test_model_that_loads_but_cannot_run_is_rejected(
    error: Exception, kind: type[UserError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only errors of memory, devices and killed processes may pass."""

    def generate(*_: object) -> Iterator[None]:
        raise error
        yield

    replace_vllm(monkeypatch, lambda **_: None)
    monkeypatch.setattr(VllmModel, "_require_template", lambda *_: None)
    monkeypatch.setattr(VllmModel, "generate", generate)
    with pytest.raises(UserError, match="vLLM loads my/model but cannot run it") as refused:
        VllmModel(EngineConfig(), "my/model")
    assert type(refused.value) is kind and str(error).splitlines()[0].rstrip(".") in str(refused.value)
    assert "frames" not in str(refused.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Model architectures ['Mine'] are not supported for now.\nframes"), ModelRefused),
        (UserError("vLLM has no argument max_num_seq (engine.vllm.max_num_seq); remove it"), ModelRefused),
        (ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization"), UserError),
        (ValueError("No available memory for the cache blocks"), UserError),
        (RuntimeError("Engine core initialization failed. See root cause above."), UserError),
        (OSError("Stale file handle"), UserError),
    ],
)
def test_only_configuration_that_vllm_rejects_is_not_retried(
    error: Exception, kind: type[UserError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(**_: object) -> None:
        raise error

    replace_vllm(monkeypatch, load)
    with pytest.raises(UserError, match=re.escape(first_line_of(error))) as refused:
        VllmModel(EngineConfig(), "my/model")
    assert type(refused.value) is kind
    assert "frames" not in str(refused.value)


def replace_vllm(monkeypatch: pytest.MonkeyPatch, load: Callable[..., None]) -> None:
    """Let `VllmModel` call a function instead of `vllm.LLM`."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=load, __version__="0"))
    monkeypatch.setattr(vllm_process, "prepare_vllm_environment", lambda: "a GPU")
    monkeypatch.setattr(vllm_process, "require_package", lambda _: None)
    monkeypatch.setattr(vllm_process, "vllm_arguments", lambda *_, **__: {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }}", None),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}any",
            "refuses .* of p1 .no sy",
        ),
        ("{{ messages[-1].content }}", "omits the system message of p1; remove it"),
    ],
)
def test_system_message_must_be_rendered(template: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal reaches the owner of the process as an error that no retry would fix."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    model = VllmModel.__new__(VllmModel)
    model._llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    model._renders_system, model._template_kwargs = False, {}
    model.protocol, model.seconds = {}, {}

    def generate(requests: Sequence[GenerateRequest], _: SamplingConfig) -> Iterator[list[Any]]:
        for request in requests:
            assert model._render(request)
        yield []

    monkeypatch.setattr(model, "generate", generate)
    monkeypatch.setattr(model, "close", lambda: None)
    monkeypatch.setattr(vllm_process, "VllmModel", lambda *_: model)
    requests = [GenerateRequest("p0", "one"), GenerateRequest("p1", "one", earlier=(("system", "two"),))]
    owner, connection = Pipe()
    child = threading.Thread(target=vllm_process.serve_until_owner_leaves, args=(connection,))
    child.start()
    owner.send(LoadModel(EngineConfig(), "model"))
    assert isinstance(owner.recv(), ModelLoaded)
    owner.send(Generate(requests, SamplingConfig()))
    while (reply := owner.recv()) == []:
        pass
    owner.close()
    child.join()
    if words is None:
        assert isinstance(reply, GenerateDone)
    else:
        assert isinstance(reply, ModelRefused) and re.search(words, str(reply))


def test_chat_template_gets_arguments_of_training() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %} without{% endif %}"
    model = VllmModel.__new__(VllmModel)
    model._llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    model._template_kwargs = {"enable_thinking": False}
    assert tokenizer.decode(model._tokenize([{"role": "user", "content": "one"}])) == "one without"


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError, ConnectionResetError])
def test_broken_pipe_in_vllm_is_not_mistaken_for_owner_exit(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise error("a worker of vLLM died")

    monkeypatch.setattr(vllm_process, "VllmModel", load)
    owner, connection = Pipe()
    owner.send(LoadModel(EngineConfig(), "model"))
    with pytest.raises(error, match="a worker of vLLM died"):
        vllm_process.serve_until_owner_leaves(connection)
    assert owner.recv() == VllmFailed(f"{error.__name__}: a worker of vLLM died")
    owner.send(LoadModel(EngineConfig(), "model"))
    owner.close()
    vllm_process.serve_until_owner_leaves(connection)
