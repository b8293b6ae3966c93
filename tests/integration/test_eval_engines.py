"""Engines on a tiny random model: vLLM in a process of its own, and vLLM's own server over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_pipeline.engines.answer import Answer, Request, Sampling
from eval_pipeline.engines.engine import Engine, EngineDied, open_engine
from eval_pipeline.engines.settings import EngineSettings
from eval_pipeline.engines.vllm_model import CPU_NICENESS
from tests.helpers import ROOT
from tests.helpers.evaluation import evaluate, slow_problems, write_recipe
from tests.helpers.models import make_model, make_tokenizer, save
from verl_ext.errors import UserError

MAX_MODEL_LEN = 512
SETTINGS = EngineSettings(dtype="float32")
GREEDY = Sampling(max_tokens=24)
SAMPLED = Sampling(max_tokens=24, temperature=1.0, top_p=0.95, seed=3)
# with the template, more tokens together than vLLM takes up in one step on a CPU (4096)
REQUESTS = [Request(f"p{i}", f"Prompt number {i}. " * (2 + i % 7)) for i in range(60)]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    tokenizer = make_tokenizer()
    return save(tmp_path_factory.mktemp("random") / "huggingface", make_model(tokenizer, MAX_MODEL_LEN), tokenizer)


@pytest.fixture(scope="module")
def engine(export: Path) -> Iterator[Engine]:
    with open_engine(SETTINGS, export) as engine:
        yield engine


def answer_all(engine: Engine, requests: list[Request], sampling: Sampling) -> dict[tuple[str, int], Answer]:
    answers = {(request.problem_id, request.sample): answer for request, answer in engine.answers(requests, sampling)}
    assert len(answers) == len(requests)
    return answers


def test_protocol_says_what_the_figures_depend_on(engine: Engine) -> None:
    told = engine.protocol
    assert told["engine"].startswith("vllm 0.")
    assert (told["dtype"], told["max_model_len"], told["tensor_parallel_size"]) == ("float32", MAX_MODEL_LEN, 1)
    assert json.loads(json.dumps(told)) == told
    assert engine.seconds["import_s"] > 0 and engine.seconds["load_s"] > 0


ARGUMENTS = """
import json, sys
from eval_pipeline.engines.vllm_arguments import arguments_for
from eval_pipeline.recipe.load import load_recipe
model, device, *overrides = sys.argv[1:]
print(json.dumps(arguments_for(load_recipe("quickstart", overrides).engine, model, on_gpu=device == "gpu")))
"""


def arguments_of(export: Path, device: str, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-c", ARGUMENTS, str(export), device, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_vllm_gets_what_the_recipe_says(export: Path) -> None:
    keys = {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 2, "max_model_len": 64, "dtype": "float16"}
    overrides = [*(f"engine.{key}={value}" for key, value in keys.items()), "engine.vllm.max_num_seqs=7"]
    told = arguments_of(export, "gpu", *overrides)
    assert told.items() >= {**keys, "max_num_seqs": 7, "enforce_eager": False, "model": str(export)}.items()


def test_on_a_cpu_float32_weights_are_computed_as_they_are(export: Path) -> None:
    assert arguments_of(export, "cpu")["dtype"] == "float32"
    assert arguments_of(export, "gpu")["dtype"] == "bfloat16"


def test_on_a_cpu_a_training_goes_first(engine: Engine) -> None:
    [child] = [each for each in psutil.Process().children() if "eval_pipeline.engines.vllm_process" in each.cmdline()]
    is_on_cpu = engine.protocol["device"] == "cpu"
    assert child.nice() == psutil.Process().nice() + (CPU_NICENESS if is_on_cpu else 0)
    autogroup = Path(f"/proc/{child.pid}/autogroup")
    assert not (is_on_cpu and autogroup.exists()) or autogroup.read_text().endswith(f" nice {CPU_NICENESS}\n")


def test_an_answer_comes_when_it_is_finished(engine: Engine) -> None:
    # the later in the list, the longer the prompt and the fewer tokens are left for the answer
    requests = [Request(str(i), "x" * (150 * i)) for i in range(4)]
    arrived = [(request.problem_id, answer) for request, answer in engine.answers(requests, Sampling(max_tokens=2048))]
    assert [problem_id for problem_id, _ in arrived] == ["3", "2", "1", "0"]
    assert all(answer.truncated and answer.error is None for _, answer in arrived)
    overhead = len(make_tokenizer().apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True))
    assert dict(arrived)["3"].num_tokens == MAX_MODEL_LEN - overhead - 450


def test_a_caller_may_stop_early_and_ask_again(engine: Engine) -> None:
    expected = answer_all(engine, REQUESTS[:8], GREEDY)
    answers = engine.answers(REQUESTS, Sampling(max_tokens=400))
    assert next(answers)[0] in REQUESTS
    answers.close()
    assert answer_all(engine, REQUESTS[:8], GREEDY) == expected


def test_a_prompt_too_long_is_an_error_of_its_own(engine: Engine) -> None:
    answers = answer_all(engine, [Request("long", "word " * 200), *REQUESTS[:2]], GREEDY)
    long = answers.pop(("long", 0))
    assert (long.text, long.num_tokens, long.truncated) == ("", 0, False)
    assert f"the model takes {MAX_MODEL_LEN}" in long.error
    assert all(answer.error is None and answer.num_tokens > 0 for answer in answers.values())


def test_sampled_answers_belong_to_their_requests(engine: Engine) -> None:
    requests = [*REQUESTS, Request("p0", REQUESTS[0].prompt, sample=1)]
    together = answer_all(engine, requests, SAMPLED)
    assert answer_all(engine, requests[::-1], SAMPLED) == together
    assert answer_all(engine, requests[:20], SAMPLED) | answer_all(engine, requests[20:], SAMPLED) == together
    assert together["p0", 0] != together["p0", 1]
    other = answer_all(engine, requests[:8], Sampling(max_tokens=24, temperature=1.0, top_p=0.95, seed=4))
    assert all(other[key] != together[key] for key in other)


def test_greedy_answers_repeat_in_a_new_process_and_its_death_is_told(engine: Engine, export: Path) -> None:
    expected = answer_all(engine, REQUESTS, GREEDY)
    with open_engine(SETTINGS, export) as second:
        assert answer_all(second, REQUESTS, GREEDY) == expected
        child = max(psutil.Process().children(), key=psutil.Process.create_time)
        with pytest.raises(EngineDied, match="SIGKILL, perhaps for lack of memory"):
            for _ in second.answers(REQUESTS, Sampling(max_tokens=400)):
                child.kill()
        with pytest.raises(EngineDied):
            next(second.answers(REQUESTS, GREEDY))


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_process_that_hangs_is_ended(is_asked: bool, export: Path) -> None:
    settings = EngineSettings(dtype="float32", timeout_s=4)
    # more than a connection takes that nobody reads
    requests = [Request(f"p{i}", f"{i} " + "x" * 400) for i in range(4000)]
    with open_engine(settings, export) as hanging:
        child = max(psutil.Process().children(), key=psutil.Process.create_time)
        if not is_asked:
            child.suspend()
        with pytest.raises(EngineDied, match=r"took no step for 4 s \(engine.timeout_s\) and was ended as hung"):
            for _ in hanging.answers(REQUESTS if is_asked else requests, Sampling(max_tokens=400)):
                child.suspend()
        assert not child.is_running()


def test_answers_may_take_longer_than_a_step_may(export: Path) -> None:
    number = 32
    with open_engine(EngineSettings(dtype="float32", timeout_s=3), export) as engine:
        while engine.seconds["generate_s"] < 4:  # however quick the machine
            engine.seconds["generate_s"] = 0.0
            # all of one length, so that none is finished before the last step
            answer_all(engine, [Request(str(i), "x") for i in range(number)], Sampling(max_tokens=400))
            number *= 2


def break_config(export: Path) -> EngineSettings:
    (export / "config.json").write_text('{"model_type": "no-such-model"}')
    return SETTINGS


def drop_template(export: Path) -> EngineSettings:
    (export / "chat_template.jinja").unlink()
    return SETTINGS


def drop_weights(export: Path) -> EngineSettings:
    (export / "model.safetensors").write_bytes(b"no weights")
    return SETTINGS


def misspell(export: Path) -> EngineSettings:
    return EngineSettings(vllm={"max_num_seq": 8})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_config, "no-such-model"),
        (drop_template, "has no chat template that works"),
        (drop_weights, "vLLM cannot use"),
        (misspell, "engine.vllm.max_num_seq is no argument of vllm.LLM; did you mean max_num_seqs"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    spoil: Callable[[Path], EngineSettings], message: str, export: Path, tmp_path: Path
) -> None:
    settings = spoil(shutil.copytree(export, tmp_path / "spoilt"))
    with pytest.raises(UserError, match=message) as error, open_engine(settings, tmp_path / "spoilt"):
        pass
    assert "\n" not in str(error.value)


ASK_FOR_EVER = """
import sys
from pathlib import Path
from eval_pipeline.engines.answer import Request, Sampling
from eval_pipeline.engines.engine import open_engine
from eval_pipeline.engines.settings import EngineSettings
with open_engine(EngineSettings(dtype="float32"), Path(sys.argv[1])) as engine:
    print("heavy" if {"torch", "vllm", "transformers"} & sys.modules.keys() else "light", flush=True)
    while True:
        list(engine.answers([Request("p", "x")], Sampling(max_tokens=400)))
"""


def test_a_killed_owner_leaves_no_process_behind(export: Path) -> None:
    command = [sys.executable, "-c", ASK_FOR_EVER, str(export)]
    owner = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "light\n"  # and not a word of vLLM's before it
    children = psutil.Process(owner.pid).children(recursive=True)
    assert children
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    gone, left = psutil.wait_procs(children, timeout=60)
    assert not left and len(gone) == len(children)


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[str]:
    """URL of vLLM's own server, which ends with the module."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    options = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --served-model-name tiny"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(export), *options.split()]
    process = subprocess.Popen(
        command, env={**ENVIRONMENT, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end_with_children(process)


def end_with_children(process: subprocess.Popen) -> None:
    # asked first: a server that is killed leaves semaphores behind
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    psutil.wait_procs([psutil.Process(process.pid), *children], timeout=30)
    process.kill()
    process.wait()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def wait_until_ready(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None and time.monotonic() < deadline
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)


def test_a_checkpoint_is_evaluated_on_the_server_that_loaded_it(export: Path, server: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", {"tier1": {"sums": slow_problems(2, 0)}})
    engine = (
        "--recipe",
        recipe,
        "--no-wandb",
        "sampling.max_tokens=8",
        "engine.kind=openai",
        f"engine.base_url={server}",
    )
    process = evaluate("run", "--checkpoint", export, "--output", tmp_path / "place", *engine)
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "place" / "metrics.json").read_text())
    assert (metrics["export"], metrics["protocol"]["sums"]["root"]) == (str(export), str(export))
    other = shutil.copytree(export, tmp_path / "other")
    process = evaluate("run", "--checkpoint", other, "--output", tmp_path / "none", *engine)
    assert process.returncode == 2 and f"does not say that it serves {other} but tiny" in process.stderr
    assert not (tmp_path / "none").exists()


def test_a_server_gives_the_same_answers(engine: Engine, server: str) -> None:
    # of the prompt of 450 characters fewer than 24 tokens are left
    requests = [*REQUESTS[:16], Request("nearly", "x" * 450), Request("long", "word " * 200)]
    with open_engine(EngineSettings(kind="openai", base_url=server, concurrency=8), None) as remote:
        assert (remote.protocol["model"], remote.protocol["base_url"]) == ("tiny", server)
        assert remote.protocol["max_model_len"] == MAX_MODEL_LEN
        for sampling in (Sampling(max_tokens=64), SAMPLED):
            ours = answer_all(engine, requests, sampling)
            theirs = answer_all(remote, requests, sampling)
            assert ours.pop(("long", 0)).error is not None
            assert "context length" in theirs.pop(("long", 0)).error
            assert theirs == ours
        assert remote.seconds["generate_s"] > 0
