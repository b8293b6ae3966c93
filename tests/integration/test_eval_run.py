"""`python -m eval_pipeline run` as a user starts it, on a tiny model that has learnt three answers by heart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# each problem with the answer that the model learns: a right one, a wrong one, one that does not parse
LEARNT = [
    ("add", ["assert add(1, 2) == 3"], "Here:\n```python\ndef add(a, b):\n    return a + b\n```"),
    ("neg", ["assert neg(1) == -1", "assert neg(0) == 0"], "```python\ndef neg(a):\n    return a\n```\nEasy."),
    ("two", ["assert two() == 2"], "```python\ndef two(:\n```"),
]
MAX_MODEL_LEN = 96


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([answer for _, _, answer in LEARNT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=MAX_MODEL_LEN,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def learn(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    chats = [
        f"<|im_start|>user\n{prompt(name)}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        for name, _, answer in LEARNT
    ]
    batch = tokenizer(chats, padding=True, padding_side="right", return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is ten times slower on threads that wait for a busy machine
    for _ in range(120):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(num_threads)


def prompt(name: str) -> str:
    return f"{name}: write the function {name}."


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with one checkpoint and a data set of the learnt problems and one too long for the model."""
    root = tmp_path_factory.mktemp("checkpoints")
    export = root / "demo" / "sft" / "global_step_30" / "huggingface"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    learn(model, tokenizer)
    model.save_pretrained(export)
    tokenizer.save_pretrained(export)
    write_problems(root / "heart" / "problems.jsonl")
    (export.parents[1] / "config.yaml").write_text(
        f"eval: {{problems: {root}/heart/problems.jsonl}}\ntrainer: {{project_name: demo, experiment_name: sft}}\n"
    )
    return export.parents[1]


def write_problems(path: Path) -> None:
    rows = [
        {"problem_id": name, "prompt": prompt(name), "entry_point": name, "tests": tests} for name, tests, _ in LEARNT
    ]
    rows.append({"problem_id": "long", "prompt": "word " * 100, "entry_point": "f", "tests": ["assert f()"]})
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, rows)))


def evaluate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "eval_pipeline", "run", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_figures_of_a_checkpoint(run_dir: Path) -> None:
    process = evaluate("--checkpoint", run_dir / "global_step_30")
    assert process.returncode == 0, process.stderr
    output = run_dir / "eval" / "eval_step_30"
    metrics = json.loads((output / "metrics.json").read_text())
    rows = [json.loads(line) for line in (output / "qa_logs" / "heart_qa.jsonl").read_text().splitlines()]

    assert [row["answer"] for row in rows] == [*(answer for _, _, answer in LEARNT), ""]
    assert [row["error_type"] for row in rows] == ["success", "wrong_answer", "syntax_error", "api_error"]
    assert [row["pass_ratio"] for row in rows] == [1.0, 0.5, 0.0, 0.0]

    tokenizer = make_tokenizer()
    num_tokens = sum(len(tokenizer(answer)["input_ids"]) + 1 for _, _, answer in LEARNT)  # and the end of the turn
    expected = {
        "num_problems": 4,
        "exec_success_rate": 0.5,
        "accepted_at_1": 0.25,
        "pass_ratio_mean": 0.375,
        "pass_ratio_p50": 0.25,
        "truncation_rate": 0.0,
        "avg_gen_tokens": num_tokens / 4,
        "cost_per_solved_tokens": num_tokens,
    }
    figures = metrics["datasets"]["heart"]
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert (metrics["step"], metrics["isolation"]) == (30, "rlimits")
    assert metrics["protocol"]["max_model_len"] == MAX_MODEL_LEN
    assert process.stdout.startswith("step_30, isolation rlimits\nheart\n")

    (log,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    recorded = log.read_bytes()
    assert b"phase1_eval_step_30" in recorded and b"eval/heart/exec_success_rate" in recorded


def test_random_model_solves_nothing(tmp_path: Path, run_dir: Path) -> None:
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(tmp_path / "random")
    tokenizer.save_pretrained(tmp_path / "random")
    problems = run_dir.parents[1] / "heart" / "problems.jsonl"
    options = ("--problems", problems, "--limit", "2", "--max-tokens", "8", "--no-wandb")
    process = evaluate("--checkpoint", tmp_path / "random", *options)
    assert process.returncode == 0, process.stderr
    metrics = json.loads((tmp_path / "eval_random" / "metrics.json").read_text())
    figures = metrics["datasets"]["heart"]
    assert (metrics["step"], figures["num_problems"], figures["exec_success_rate"]) == (None, 2, 0.0)
    assert (figures["avg_gen_tokens"], figures["truncation_rate"]) == (8.0, 1.0)
    assert figures["cost_per_solved_tokens"] is None
    assert not (tmp_path / "wandb").exists()


def test_bad_input_is_exit_code_2_without_a_traceback(tmp_path: Path, run_dir: Path) -> None:
    model = shutil.copytree(run_dir / "global_step_30" / "huggingface", tmp_path / "model")
    (tmp_path / "bad.jsonl").write_text("{}")
    cases = {
        "not a directory": ("--checkpoint", tmp_path / "none"),
        "name a file with --problems": ("--checkpoint", model),
        "bad.jsonl, line 1": ("--checkpoint", model, "--problems", tmp_path / "bad.jsonl"),
        "no config.json": ("--checkpoint", tmp_path),
        "below 1": ("--checkpoint", model, "--limit", "0"),
    }
    for message, arguments in cases.items():
        process = evaluate(*arguments, "--no-wandb")
        assert process.returncode == 2
        assert message in process.stderr and "Traceback" not in process.stderr


def test_killed_evaluation_leaves_no_engine_behind(run_dir: Path) -> None:
    checkpoint = str(run_dir / "global_step_30")
    command = [sys.executable, "-m", "eval_pipeline", "run", "--checkpoint", checkpoint, "--no-wandb"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(listing.read_text().split()) == 2)  # multiprocessing's resource tracker and the engine
    children = listing.read_text().split()
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in children))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_help_shows_an_example() -> None:
    process = evaluate("--help")
    assert process.returncode == 0
    assert "python -m eval_pipeline run --checkpoint" in process.stdout
