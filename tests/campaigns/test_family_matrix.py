"""Campaign: each cell of docs/reference/models.md, by the commands that a user types, with a tiny model of the family.

`test_families.py` compares losses and gradients of packed and padded samples.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers.commands import GRPORun, SFTRun, TrainingRun
from tests.helpers.evaluation import evaluate, problem, read_lines, write_recipe
from tests.helpers.models import SUPPORT, Support, write_family

PROMPTS = ("add: write the function add.", "f: name a color.", "g: " + "word " * 30, "h: 1 2 3 4")
NUM_TOKENS = 24
OPTIONS = {"sampling": {"max_tokens": NUM_TOKENS}, "qa_per_error_type": len(PROMPTS), "max_attempts": 1}


@pytest.fixture(scope="module", params=SUPPORT, ids=lambda support: support.family)
def support(request: pytest.FixtureRequest) -> Support:
    """A row of the table."""
    return request.param


@pytest.fixture(scope="module")
def model(support: Support, quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family."""
    return write_family(support.family, quickstart, tmp_path_factory.mktemp("family") / "family") / "model"


@pytest.fixture(scope="module")
def trained(model: Path, quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SFTRun, str]:
    """A finished run of two steps, and its standard error."""
    run = sft_run(model, quickstart, tmp_path_factory.mktemp("trained") / "run")
    return run, run.finish().stderr


def sft_run(model: Path, quickstart: Path, run_dir: Path, *overrides: str) -> SFTRun:
    """Two steps on one rank; `val/loss` is measured before and after them."""
    options = (f"model.partial_pretrain={model}", "trainer.total_training_steps=2", "trainer.val_before_train=true")
    saving = ("trainer.save_freq=-1", "trainer.checkpoint.export.dtype=fp32", "optim.lr=1e-2")
    return SFTRun(quickstart, run_dir, *options, *saving, *overrides, num_ranks=1, dropout=False)


def export_of(run: SFTRun) -> Path:
    """The model of a finished run."""
    return run.run_dir / "global_step_2/huggingface"


def validations(run: SFTRun) -> list[float]:
    """`val/loss` before and after a run's steps."""
    return [row["val/loss"] for row in run.rows() if "val/loss" in row]


def assert_learns_and_exports(run: SFTRun, quickstart: Path, directory: Path) -> None:
    """Assert that a finished run has learned, and that a run starting from its export has the same loss."""
    before, after = validations(run)
    assert after < before
    second = sft_run(export_of(run), quickstart, directory / "second")
    second.finish()
    assert validations(second)[0] == pytest.approx(after, rel=1e-5)


def test_sft_learns_and_exports(trained: tuple[SFTRun, str], quickstart: Path, tmp_path: Path) -> None:
    assert_learns_and_exports(trained[0], quickstart, tmp_path)


def test_unsupported_packing_is_reported_or_rejected(
    support: Support, trained: tuple[SFTRun, str], model: Path, quickstart: Path, tmp_path: Path
) -> None:
    """Without support, one line reports that samples are padded, and `data.packing=true` is rejected."""
    lines = [line for line in trained[1].splitlines() if line.startswith("Samples are padded instead of packed: ")]
    assert len(lines) == ("packing" in support.reasons)
    if lines:
        assert_refused(sft_run(model, quickstart, tmp_path / "run", "data.packing=true"), "data.packing=auto")


def assert_refused(run: TrainingRun, remedy: str) -> None:
    """Assert that the command fails with one line that says what to do instead."""
    result = run.start()
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and remedy in error and "Traceback" not in result.stderr, result.stderr


def test_lora_learns_and_exports(model: Path, quickstart: Path, tmp_path: Path) -> None:
    run = sft_run(model, quickstart, tmp_path / "run", "model.lora_rank=4", "model.target_modules=all-linear")
    run.finish()
    assert_learns_and_exports(run, quickstart, tmp_path)


def test_vllm_gives_greedy_answers_of_transformers(
    support: Support, trained: tuple[SFTRun, str], tmp_path: Path
) -> None:
    dtype = "bfloat16" if support.family == "qwen3_5" else "float32"
    problems = [problem(f"p{number}", prompt, "assert True") for number, prompt in enumerate(PROMPTS)]
    recipe = write_recipe(tmp_path / "few.yaml", {"tier1": {"few": problems}}, engine={"dtype": dtype}, **OPTIONS)
    words = ("--checkpoint", export_of(trained[0]), "--output", tmp_path / "output", "--recipe", recipe, "--no-wandb")
    done = evaluate("run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["problem_id"]: row["answer"] for row in read_lines(tmp_path / "output/qa_logs/few_qa.jsonl")}
    answers = [rows[f"p{number}"] for number in range(len(PROMPTS))]
    # vLLM omits bytes of incomplete characters
    assert answers == [answer.rstrip("\ufffd") for answer in greedy_answers(export_of(trained[0]), dtype)]


def greedy_answers(export: Path, dtype: str) -> list[str]:
    """The answers of transformers to `PROMPTS`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=dtype)
    answers = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_second_grpo_step_samples_from_updated_weights(
    engine: str, support: Support, model: Path, quickstart: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def length(solution_str, **rest): return float(len(solution_str))\n")
    options = (f"model.partial_pretrain={model}", f"rollout.engine={engine}", "optim.lr=0.01", "trainer.save_freq=-1")
    reward = (f"reward.functions=[{tmp_path}/mine.py:length]", "data.eval_every_steps=0")
    run = GRPORun(quickstart, tmp_path / "run", *options, *reward, "trainer.total_training_steps=2", num_ranks=1)
    if f"GRPO with {engine}" in support.reasons:
        assert_refused(run, "rollout.engine=hf")
        return
    run.finish()
    rows = [row for row in run.rows() if "train/loss" in row]
    assert len(rows) == 2 and all(row["train/grad_norm"] > 0.01 and math.isfinite(row["train/loss"]) for row in rows)
    assert all(row["train/rollout_logprob_diff_max"] < 1e-4 for row in rows), rows
