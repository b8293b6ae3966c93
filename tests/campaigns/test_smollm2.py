"""Campaign: SmolLM2 from its package becomes a model that transformers loads and that ends its turns."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.commands import python


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
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        (tokens,) = model.generate(prompt, max_new_tokens=40, do_sample=False)
    answer = tokens[prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
