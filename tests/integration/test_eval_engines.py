"""Engines on a tiny random model: vLLM in a separate process, and vLLM's own server over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import Engine, GenerateRequest
from eval_pipeline.engines.vllm_process import CPU_NICENESS
from eval_pipeline.worker import open_engine
from tests.helpers.commands import environment, python
from tests.helpers.engines import GREEDY, MAX_MODEL_LEN, REQUESTS, answer_all, make_export, owner_of, vllm_processes
from tests.helpers.evaluation import evaluate, slow_problems, write_recipe
from tests.helpers.processes import alive, family_of, free_port, wait_gone, wait_until
from verl_ext.hardware import visible_gpus

SETTINGS = EngineConfig(dtype="float32")
SAMPLED = SamplingConfig(max_tokens=24, temperature=1.0, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    return make_export(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def engine(export: Path) -> Iterator[Engine]:
    with open_engine(SETTINGS, export) as engine:
        yield engine


def test_protocol_records_settings_that_affect_metrics(engine: Engine) -> None:
    protocol = engine.protocol
    assert protocol["engine"].startswith("vllm 0.")
    found = tuple(protocol[name] for name in ("dtype", "max_model_len", "tensor_parallel_size"))
    assert found == ("float32", MAX_MODEL_LEN, 1)
    assert json.loads(json.dumps(protocol)) == protocol
    assert engine.seconds["import_s"] > 0 and engine.seconds["load_s"] > 0


def test_training_has_priority_on_cpu(engine: Engine) -> None:
    [child] = vllm_processes(psutil.Process())
    is_on_cpu = engine.protocol["device"] == "cpu"
    assert child.nice() == psutil.Process().nice() + (CPU_NICENESS if is_on_cpu else 0)
    autogroup = Path(f"/proc/{child.pid}/autogroup")
    assert not (is_on_cpu and autogroup.exists()) or autogroup.read_text().endswith(f" nice {CPU_NICENESS}\n")


def test_answers_are_returned_as_they_finish(engine: Engine) -> None:
    from tests.helpers.models import make_tokenizer

    # the later a request is in the list, the longer is its prompt, and the fewer tokens are left for the answer
    requests = [GenerateRequest(str(i), "x" * (150 * i)) for i in range(4)]
    arrived = [
        (request.problem_id, answer) for request, answer in engine.answers(requests, SamplingConfig(max_tokens=2048))
    ]
    assert [problem_id for problem_id, _ in arrived] == ["3", "2", "1", "0"]
    assert all(answer.truncated and answer.error is None for _, answer in arrived)
    empty = [{"role": "user", "content": ""}]
    overhead = len(make_tokenizer().apply_chat_template(empty, add_generation_prompt=True, return_dict=False))
    assert dict(arrived)["3"].num_tokens == MAX_MODEL_LEN - overhead - 450


def test_caller_may_stop_early_and_ask_again(engine: Engine) -> None:
    expected = answer_all(engine, REQUESTS[:8], GREEDY)
    answers = engine.answers(REQUESTS, SamplingConfig(max_tokens=400))
    assert next(answers)[0] in REQUESTS
    answers.close()
    assert answer_all(engine, REQUESTS[:8], GREEDY) == expected


def test_too_long_prompt_fails_only_its_own_request(engine: Engine) -> None:
    answers = answer_all(engine, [GenerateRequest("long", "word " * 200), *REQUESTS[:2]], GREEDY)
    long = answers.pop(("long", 0))
    assert (long.text, long.num_tokens, long.truncated) == ("", 0, False)
    assert f"the model takes {MAX_MODEL_LEN}" in long.error
    assert all(answer.error is None and answer.num_tokens > 0 for answer in answers.values())


def test_sampled_answers_are_independent_of_batch(engine: Engine) -> None:
    requests = [*REQUESTS, GenerateRequest("p0", REQUESTS[0].prompt, sample=1)]
    together = answer_all(engine, requests, SAMPLED)
    assert answer_all(engine, requests[::-1], SAMPLED) == together
    assert answer_all(engine, requests[:20], SAMPLED) | answer_all(engine, requests[20:], SAMPLED) == together
    assert together["p0", 0] != together["p0", 1]
    other = answer_all(engine, requests[:8], SamplingConfig(max_tokens=24, temperature=1.0, top_p=0.95, seed=4))
    assert all(other[key] != together[key] for key in other)


def test_greedy_answers_repeat_and_killed_owner_leaves_no_process(engine: Engine, export: Path) -> None:
    with owner_of(export, SETTINGS, cold=True) as owner:
        assert owner.line() == []  # the owner imports no large package, and vLLM's output is not the owner's
        expected = answer_all(engine, REQUESTS, GREEDY)
        assert sorted(owner.line()) == sorted([*key, *astuple(answer)] for key, answer in expected.items())
        children = family_of(owner.process)
        assert vllm_processes(owner.process)
        owner.process.kill()
        owner.process.wait()
        wait_gone(children)


def test_death_of_process_is_reported(export: Path) -> None:
    with owner_of(export, SETTINGS) as owner:
        owner.line(), owner.line()
        [child] = vllm_processes(owner.process)
        child.kill()
        assert "SIGKILL, possibly out of memory" in owner.line()
        assert "SIGKILL" in owner.line()  # also on every further call


def test_hanging_process_is_killed(export: Path) -> None:
    with owner_of(export, EngineConfig(dtype="float32", timeout_s=4)) as owner:
        owner.line(), owner.line()
        [child] = vllm_processes(owner.process)
        child.suspend()
        message = owner.line()
        assert "4 s" in message and "engine.timeout_s" in message
        assert not alive([child])


def break_config(export: Path) -> EngineConfig:
    (export / "config.json").write_text('{"model_type": "no-such-model"}')
    return SETTINGS


def drop_template(export: Path) -> EngineConfig:
    (export / "chat_template.jinja").unlink()
    return SETTINGS


def drop_weights(export: Path) -> EngineConfig:
    (export / "model.safetensors").write_bytes(b"no weights")
    return SETTINGS


def narrow_heads(export: Path) -> EngineConfig:
    config = json.loads((export / "config.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # the weights have the same shapes
    (export / "config.json").write_text(json.dumps(config))
    return SETTINGS


def misspell(export: Path) -> EngineConfig:
    return EngineConfig(vllm={"max_num_seq": 8})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_config, "no-such-model"),
        (drop_template, "has no working chat template"),
        (drop_weights, "vLLM cannot load"),
        pytest.param(
            narrow_heads,
            "cannot run it (Unsupported CPU attention configuration: head_dim=16",
            marks=pytest.mark.skipif(bool(visible_gpus()), reason="only vLLM's CPU kernels refuse such heads"),
        ),
        (misspell, "no argument max_num_seq (engine.vllm.max_num_seq); did you mean engine.vllm.max_num_seqs"),
    ],
)
def test_rejects_unloadable_model(
    spoil: Callable[[Path], EngineConfig], message: str, export: Path, tmp_path: Path
) -> None:
    settings = spoil(Path(shutil.copytree(export, tmp_path / "spoilt")))
    with owner_of(tmp_path / "spoilt", settings) as owner:
        refusal = owner.line()
        assert message in refusal and "\n" not in refusal
        assert owner.line() is None and owner.process.wait() == 0


@pytest.fixture(scope="module")
def arguments(export: Path, quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM gets for the model, for two models that bring code, and for one with linear attention.

    `own` has an architecture of its own, `known` one that vLLM has. Both name code that leaves a mark.
    """
    from tests.helpers.models import make_model, make_tokenizer, save, write_family

    directory, tokenizer = tmp_path_factory.mktemp("arguments"), make_tokenizer()
    known = save(directory / "known", make_model(tokenizer), tokenizer)
    (known / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(directory / 'planted')!r}).mkdir(exist_ok=True)\n"
        "from transformers import Qwen2ForCausalLM as Planted\n"
    )
    config = json.loads((known / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "planted.Planted", "AutoModelForCausalLM": "planted.Planted"}
    (known / "config.json").write_text(json.dumps(config))
    own = Path(shutil.copytree(known, directory / "own"))
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["Planted"]}))
    linear = write_family("qwen3_5", quickstart, directory / "linear") / "model"
    done = python("tests.ranks.vllm_arguments", export, directory / "planted", own, known, linear, imports="vllm")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_gets_settings_of_recipe(arguments: dict[str, Any], export: Path) -> None:
    keys = {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 2, "max_model_len": 64, "dtype": "float16"}
    expected = {**keys, "max_num_seqs": 7, "enforce_eager": True, "model": str(export)}
    assert arguments["overridden"].items() >= expected.items()
    assert arguments["gpu"]["kv_cache_memory_bytes"] >= 1 << 28 and "kv_cache_memory_bytes" not in arguments["cpu"]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("gpu before Ampere", "auto")])
def test_dtype_of_float32_weights_depends_on_device(device: str, dtype: str, arguments: dict[str, Any]) -> None:
    assert arguments[device]["dtype"] == dtype


def test_linear_attention_runs_in_bfloat16_on_cpu(arguments: dict[str, Any]) -> None:
    """vLLM has no other CPU kernels for it; its prefix cache would need chunked prefill."""
    linear = arguments["linear"]
    assert (linear["dtype"], linear["enable_prefix_caching"]) == ("bfloat16", False)
    assert "set engine.dtype=auto" in arguments["linear in float32"]


def test_vllm_runs_model_code_only_on_request(arguments: dict[str, Any]) -> None:
    """CVE-2026-22807: vLLM 0.12 itself imports what auto_map names."""
    own, known, trusted = (arguments[name] for name in ("own", "known", "trusted"))
    assert not own["ran_code"] and own["max_model_len"].startswith("refused: ")
    assert "not supported" in own["max_model_len"]
    assert known == {"ran_code": False, "max_model_len": 96}
    assert trusted["ran_code"]  # and is refused, because the planted class is none that vLLM could serve


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[str]:
    """URL of vLLM's own server, which runs until the module ends."""
    port = free_port()
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    options = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --served-model-name tiny"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(export), *options.split()]
    process = subprocess.Popen(
        command, env=environment(**settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: is_healthy(port), process, pause_s=0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end_with_children(process)


def is_healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def end_with_children(process: subprocess.Popen[Any]) -> None:
    # SIGTERM first: a server that is killed leaves semaphores behind
    family = family_of(process)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    process.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def test_checkpoint_is_evaluated_on_server_that_loaded_it(export: Path, server: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", {"tier1": {"sums": slow_problems(2, 0)}})
    kind = ("engine.kind=openai", f"engine.base_url={server}")
    options = ("--recipe", recipe, "--no-wandb", "sampling.max_tokens=8", *kind)
    process = evaluate("run", "--checkpoint", export, "--output", tmp_path / "place", *options)
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "place" / "metrics.json").read_text())
    assert (metrics["export"], metrics["protocol"]["sums"]["root"]) == (str(export), str(export))
    other = Path(shutil.copytree(export, tmp_path / "other"))
    process = evaluate("run", "--checkpoint", other, "--output", tmp_path / "none", *options)
    assert process.returncode == 2 and os.fspath(other) in process.stderr and "tiny" in process.stderr
    assert not (tmp_path / "none").exists()


def test_server_gives_same_answers_as_engine(engine: Engine, server: str) -> None:
    # with the prompt of 450 characters, fewer than 24 tokens are left
    requests = [*REQUESTS[:16], GenerateRequest("nearly", "x" * 450), GenerateRequest("long", "word " * 200)]
    with open_engine(EngineConfig(kind="openai", base_url=server, concurrency=8), None) as remote:
        assert (remote.protocol["model"], remote.protocol["base_url"]) == ("tiny", server)
        assert remote.protocol["max_model_len"] == MAX_MODEL_LEN
        for sampling in (SamplingConfig(max_tokens=64), SAMPLED):
            ours = answer_all(engine, requests, sampling)
            theirs = answer_all(remote, requests, sampling)
            assert ours.pop(("long", 0)).error is not None
            assert "context length" in theirs.pop(("long", 0)).error
            assert theirs == ours
        assert remote.seconds["generate_s"] > 0
