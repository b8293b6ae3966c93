"""A model trained to end its turns stops there with any loader of its export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.data import CHAT, dataset_of
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.data.chat_template import ChatTemplate, stop_token_ids
from verl_ext.data.dataset import SampleDataset
from verl_ext.distributed import build_meshes
from verl_ext.errors import UserError
from verl_ext.trainer.grpo import GRPOTrainer
from verl_ext.trainer.model import generation_config_of
from verl_ext.trainer.stages import STAGES, load_config
from verl_ext.trainer.tokenizer import load_tokenizer, missing_eos_token, require_embeddings

END_OF_TEXT, TURN_END = 0, 2  # of the quickstart's tokenizer
EXPORT = "trainer.checkpoint.save_contents=[model,hf_model]"


@pytest.fixture
def base_model(quickstart: Path, tmp_path: Path) -> Path:
    """The quickstart's model in the form of Qwen2.5's base models: text and turns end with different tokens."""
    model = tmp_path / "base_model"
    shutil.copytree(quickstart / "model", model)
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("special_tokens_map.json", "eos_token", "<|endoftext|>"),
        ("generation_config.json", "eos_token_id", END_OF_TEXT),
    ):
        path = model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lora", [(), ("model.lora_rank=4",)])
def test_export_stops_at_end_of_turn_of_training_data(
    lora: tuple[str, ...], base_model: Path, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(quickstart, tmp_path, EXPORT, *lora, f"model.partial_pretrain={base_model}")
    make_trainer(config).save_checkpoint(1)
    export = tmp_path / "global_step_1/huggingface"
    assert AutoModelForCausalLM.from_pretrained(export).generation_config.eos_token_id == [TURN_END, END_OF_TEXT]
    assert set(stop_token_ids(generation_config_of(str(export)), AutoTokenizer.from_pretrained(export))) == {0, 2}
    assert "Turns end with <|im_end|>" in capsys.readouterr().err


def test_grpo_stops_at_eos_of_model_without_generation_config(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base_model / "generation_config.json").unlink()
    path = base_model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": TURN_END}))
    config = load_config("grpo", [f"model.partial_pretrain={base_model}", "rollout.engine=hf"])
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    engine = Mock()
    monkeypatch.setattr("verl_ext.trainer.grpo.HFEngine", engine)
    trainer: Any = SimpleNamespace(config=config, model=None, tokenizer=tokenizer, autocast=None, device_name="cpu")
    GRPOTrainer.build_engine(trainer)
    _, _, ends, *_ = engine.call_args.args
    assert ends == [TURN_END, END_OF_TEXT]


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_rollouts_stop_at_end_of_turn_of_template(
    engine: str, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("grpo", [f"model.partial_pretrain={base_model}", f"rollout.engine={engine}"])
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    engines = {"hf": Mock(), "vllm": Mock()}
    monkeypatch.setattr("verl_ext.trainer.grpo.HFEngine", engines["hf"])
    monkeypatch.setattr("verl_ext.trainer.grpo.VLLMRolloutEngine", engines["vllm"])
    monkeypatch.setattr("verl_ext.trainer.grpo.WeightSync", Mock())
    trainer: Any = SimpleNamespace(config=config, model=None, tokenizer=tokenizer, autocast=None, device_name="cpu")
    GRPOTrainer.build_engine(trainer)
    call = engines[engine].call_args
    ends = call.kwargs["end_tokens"] if engine == "vllm" else call.args[2]
    assert ends == [TURN_END, END_OF_TEXT]


@pytest.mark.usefixtures("one_rank")
def test_grpo_export_stops_at_end_of_turn_of_template(
    base_model: Path, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [EXPORT, "prepare=[]", f"model.partial_pretrain={base_model}", "rollout.engine=hf", "trainer.logger=[]"]
    words += [f"data.train_files={quickstart}/prompts.parquet", "data.val_files=null", "data.eval_every_steps=0"]
    words += [f"trainer.default_local_dir={tmp_path}", "reward.functions=[reward_format]"]
    config = load_config("grpo", words)
    tokenizer, stage = load_tokenizer(config), STAGES["grpo"]
    datasets = stage.load_datasets(config, tokenizer)
    stage.trainer_class()(config, *build_meshes("cpu", 1), tokenizer, *datasets).save_checkpoint(1)
    assert generation_config_of(str(tmp_path / "global_step_1/huggingface")).eos_token_id == [TURN_END, END_OF_TEXT]
    assert "Turns end with <|im_end|>" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "end"),
    [("<|im_end|>\n", "<|im_end|>"), ("", ""), ("\n###\n", ""), ("<|im_end|>\n<|endoftext|>", "")],
)
def test_turn_end_is_single_special_token(quickstart: Path, after: str, end: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    body = "{{ m.role }}: {{ m.content }}{{ after if m.role == 'assistant' else '|' }}"
    asks = "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + body + "{% endfor %}" + asks
    assert ChatTemplate(tokenizer, {"after": after}).turn_end == end


@pytest.mark.usefixtures("one_rank")
def test_model_with_matching_eos_is_unchanged(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path))
    assert trainer.model.generation_config.eos_token_id == TURN_END
    assert "urns" not in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_warns_about_turns_without_end_token(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}Bot:"
    )
    path = tmp_path / "rows.parquet"
    pd.DataFrame([{"messages": CHAT[:2]}] * 8).to_parquet(path)
    overrides = [f"data.train_files={path}", "data.val_files=null", "trainer.test_freq=-1"]
    make_trainer(small_config(quickstart, tmp_path, *overrides, f"data.chat_template={template}"))
    assert "no turn ends with a stop token" in capsys.readouterr().err


def test_token_without_embedding_is_refused_with_its_row(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    added = len(tokenizer)
    dataset = dataset_of([{"messages": CHAT[:2]}], tokenizer, tmp_path)
    tokenizer.add_tokens(["<new>"])
    require_embeddings(dataset, tokenizer, added)  # no sample uses the new token
    said = [CHAT[0], {"role": "assistant", "content": "It is <new>."}]
    dataset = dataset_of([{"messages": CHAT[:2]}, {"messages": said}], tokenizer, tmp_path)
    with pytest.raises(UserError, match=rf"rows 1: token {added} \('<new>'\) exceeds the model's {added} embeddings"):
        require_embeddings(dataset, tokenizer, added)
    assert SampleDataset.first_token_from(dataset, added) == (1, added)


def test_counts_last_loss_token_of_each_sample(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    rows = [{"messages": CHAT[:2]}, {"messages": CHAT}, {"messages": CHAT[:2]}]
    whole = dataset_of(rows, tokenizer, tmp_path).final_tokens()
    assert whole == {TURN_END: 3}
    cut = dataset_of(rows, tokenizer, tmp_path, "data.max_length=40", "data.truncation=right").final_tokens()
    assert cut[TURN_END] == 2 and cut.total() == 3
    assert missing_eos_token(cut, [END_OF_TEXT], tokenizer) == TURN_END
    assert missing_eos_token(cut, [TURN_END], tokenizer) is None


def test_sample_without_loss_token_has_no_final_token(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    long, options = [{"role": "user", "content": "x" * 200}, CHAT[1]], ("data.max_length=40", "data.truncation=right")
    rows = [{"messages": messages} for messages in (long, CHAT[:2], long, CHAT, long)]
    cut = dataset_of(rows, tokenizer, tmp_path, *options)
    assert [bool(sample["loss_mask"].any()) for sample in map(cut.__getitem__, range(5))] == [False, True] * 2 + [False]
    assert cut.final_tokens() == dataset_of([rows[1], rows[3]], tokenizer, tmp_path, *options).final_tokens()
