"""Campaign: SmolLM2 from its package answers, ends its turns, and learns from the rewards in docs/guides/grpo.md."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.commands import TrainingRun, python
from tests.helpers.docs import GRPOExample, link_repository


def test_model_answers_and_ends_its_turn(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "smollm2"
    done = python("verl_ext.data.prepare", "smollm2", "--output", output)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    text = "    def f(x): return x . y"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text  # no token before it, and no space removed
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    with torch.no_grad():
        (tokens,) = model.generate(prompt, max_new_tokens=40, do_sample=False)
    answer = tokens[prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"


def test_example_in_grpo_docs_raises_reward(tmp_path: Path) -> None:
    """Takes several minutes."""
    example, repository = GRPOExample(), tmp_path / "repository"
    example.copy_to(repository)
    done = python("verl_ext.data.prepare", *example.make_model[3:], cwd=repository)
    assert done.returncode == 0, done.stderr
    run = TrainingRun(example.train, example.run_dir(repository), imports="vllm", cwd=repository)
    with run.started() as process:
        output, errors = process.communicate(timeout=1800)  # six minutes on a quiet machine
    assert process.returncode == 0, output + errors
    rows = run.rows()
    measured = [row["eval/reward_total_mean"] for row in rows if "eval/reward_total_mean" in row]
    lengths = [row["train/seq_completion_len_mean"] for row in rows if "train/loss" in row]
    assert measured[-1] > 2 * measured[0] and lengths[-1] < lengths[0] / 2


def test_recipes_train(tmp_path: Path) -> None:
    """One step of each recipe, with the prepared data that it names; GSM8K has other problems."""
    repository = tmp_path / "repository"
    link_repository(repository)
    (repository / "gsm8k").mkdir()
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in range(40)]
    for split in ("train", "test"):
        (repository / f"gsm8k/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = "gsm8k --source gsm8k --style think"
    prompts = f"{source} --task rl --output data/gsm8k_rl"
    one_step = ("trainer.total_training_steps=1", "data.val_max_samples=2", "trainer.logger=[console]")
    few = ("data.train_batch_size=2", "data.micro_batch_size_per_gpu=2", "rollout.n=2", "data.eval_batches=1")
    for script, recipe, *overrides in (
        ("run_sft.sh", "smollm2_135m"),
        ("run_sft.sh", "smollm2_gsm8k", f"prepare=[{source} --output data/gsm8k_sft, {prompts}]"),
        ("run_grpo.sh", "smollm2_gsm8k", f"prepare=[{prompts}]", *few),
        ("run_grpo.sh", "smollm2_reasoning", *few),
    ):
        stage = script.removeprefix("run_").removesuffix(".sh")
        run_dir = repository / f"checkpoints/rlvr_coding_model/{stage}_{recipe}"
        run = TrainingRun(["bash", script, "1", f"recipe={recipe}", *one_step, *overrides], run_dir, cwd=repository)
        with run.started() as process:
            output, errors = process.communicate(timeout=1800)
        assert process.returncode == 0, output + errors
        assert run.record()["status"] == "finished" and run.last_logged() == 1
        assert (run_dir / "global_step_1/huggingface/model.safetensors").is_file()
