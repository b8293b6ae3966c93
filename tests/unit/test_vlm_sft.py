"""Chats about images in the training of a vision-language model."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from tests.helpers import vlms
from tests.helpers.data import row, write_questions
from verl_ext import rendering
from verl_ext.controller.adapters import adapter_for
from verl_ext.controller.space import ConfigurationSpace
from verl_ext.data.image_chats import ImageChat, ImageChatCollator, ImageChatDataset, load_image_chats
from verl_ext.data.image_questions import ImageQuestion, question_of
from verl_ext.distributed import build_meshes
from verl_ext.errors import UserError
from verl_ext.launch.preflight import check_questions, check_settings
from verl_ext.trainer.stages import VLMSFTConfig, load_config
from verl_ext.trainer.tokenizer import load_tokenizer
from verl_ext.trainer.vlm_sft import VLMSFTTrainer
from verl_ext.verl_api import PrecisionType

TIERS = (256, 1024, 4096)
MODEL, PROCESSOR = vlms.qwen3_vl_moe()


def question(number: int) -> ImageQuestion:
    return question_of("mine", number, row(number), "", None)


def batcher(size: int = 2) -> ImageChatCollator:
    return ImageChatCollator(PROCESSOR, size, TIERS, PROCESSOR.tokenizer.eos_token_id, None)


def questions_on_one_image(*numbers: int) -> list[ImageQuestion]:
    return [replace(question(number), image=question(0).image) for number in numbers]


def test_questions_about_one_image_share_a_chat() -> None:
    samples = [*questions_on_one_image(0, 1), question(5), *questions_on_one_image(2)]
    dataset = ImageChatDataset(samples, questions_per_chat=2)
    assert [[each.question for each in chat.questions] for chat in dataset.chats] == [
        ["what is 0 ?", "what is 1 ?"],
        ["what is 2 ?"],
        ["what is 5 ?"],
    ]
    assert dataset.lengths.tolist() == [2, 1, 1] and dataset[2]["row"] == 2
    assert dataset.describe([2]) == "mine/5" and len(ImageChatDataset(samples, 1)) == 4


def test_most_frequent_reference_is_trained_on() -> None:
    asked = replace(question(0), references=("no", "yes", "yes", "no", "maybe"))
    assert ImageChat((asked,)).answers == ["no"]
    assert ImageChat((replace(asked, references=("no", "yes", "yes")),)).answers == ["yes"]


@pytest.mark.parametrize("tier", [0, 1, 2])
def test_chat_is_generation_prompt_and_answer(tier: int) -> None:
    adapter = adapter_for(MODEL, PROCESSOR, TIERS)
    asked = adapter.inputs(question(4).load_image(), question(4).question, tier)
    made = batcher().at([{"chat": ImageChat((question(4),))}], tier)
    length = asked["input_ids"].shape[1]
    assert torch.equal(made["input_ids"][0, :length], asked["input_ids"][0])
    assert torch.equal(made["pixel_values"], asked["pixel_values"])
    assert torch.equal(made["image_grid_thw"], asked["image_grid_thw"])
    assert PROCESSOR.tokenizer.decode(made["input_ids"][0, length:]) == "1<|im_end|>"
    assert made["loss_mask"][0].tolist() == [0] * length + [1, 1]
    types = asked["mm_token_type_ids"][0].tolist()
    assert made["mm_token_type_ids"][0].tolist() == [*types, 0, 0] and sum(types) > 0
    learned = {name: tensor for name, tensor in made.items() if name != "loss_mask"}
    with torch.no_grad():
        logits = MODEL(**learned).logits[:, length - 1]
        torch.testing.assert_close(logits, adapter.prefill(asked).logits, rtol=1e-4, atol=1e-4)


def test_later_turns_match_chat_template() -> None:
    chat = ImageChat(tuple(questions_on_one_image(1, 2)))
    made = batcher().at([{"chat": chat}, {"chat": ImageChat((question(7),))}], 2)
    assert made["attention_mask"].sum(1).tolist()[0] == made["input_ids"].shape[1] > made["attention_mask"][1].sum()
    said = PROCESSOR.tokenizer.decode(made["input_ids"][0])
    assert said.endswith(
        "<|vision_end|>what is 1 ?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nwhat is 2 ?"
        "<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    learned = made["input_ids"][0][made["loss_mask"][0].bool()]
    assert PROCESSOR.tokenizer.decode(learned) == "1<|im_end|>2<|im_end|>"
    assert made["loss_mask"][1].sum() == 2


def test_template_gets_given_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESSOR, "chat_template", "{{ strftime_now('%d %b %Y') }}" + vlms.TEMPLATE)
    dated = replace(batcher(), now=datetime(2020, 7, 4, 9, 30))
    tokens, _ = dated.tokens(ImageChat((question(4),)), 1)
    assert PROCESSOR.tokenizer.decode(tokens).startswith("04 Jul 2020")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "does not terminate"),
        ("{{ raise_exception('no questions') }}", "cannot render mine/1 .*no questions"),
        ("{% for m in messages %}<|image_pad|>{{ m.role }}{% endfor %}", "omits the question of mine/1"),
    ],
)
def test_rejects_failing_or_endless_template(template: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)
    monkeypatch.setattr(PROCESSOR, "chat_template", template)
    with pytest.raises(UserError, match=names):
        batcher().check([ImageChat(tuple(questions_on_one_image(1, 2)))])
    with pytest.raises(UserError, match=names):
        batcher().check([ImageChat((question(1),))])


def test_rejects_texts_with_image_token() -> None:
    """The model would look for a second image."""
    with pytest.raises(UserError, match=r"the question of mine/1 contains <\|image_pad\|>"):
        batcher().check([ImageChat((question(0),)), ImageChat((replace(question(1), question="a <|image_pad|> b"),))])
    with pytest.raises(UserError, match=r"the answers of mine/2 contain <\|video_pad\|>"):
        batcher().check([ImageChat((replace(question(2), references=("no", "<|video_pad|>")),))])


REWRITING = vlms.TEMPLATE.replace(
    "<|im_start|>{{ m.role }}\n",
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}<think></think>{% endif %}",
)
TRIMMING = vlms.TEMPLATE.replace("{{ part.text }}", "{{ part.text | trim }}")


@pytest.mark.parametrize(("template", "answer"), [(REWRITING, "red"), (TRIMMING, " red")])
def test_rejects_template_that_rewrites_earlier_turns(
    template: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would repeat the whole chat before the second answer, and compute loss on the first answer twice."""
    first, second = questions_on_one_image(1, 2)
    chat = ImageChat((replace(first, references=(answer,)), second))
    batcher().check([chat])
    monkeypatch.setattr(PROCESSOR, "chat_template", template)
    with pytest.raises(UserError, match="mine/1.*data.questions_per_chat=1"):
        batcher().check([ImageChat((first,)), chat])
    batcher().check([ImageChat((each,)) for each in chat.questions])
    if template is TRIMMING:
        batcher().check([ImageChat((first, second))])


def test_chats_are_grouped_in_order() -> None:
    samples = [{"chat": ImageChat((question(number),)), "row": number} for number in range(12)]
    batch = batcher(size=5)(samples)
    assert [len(group) for group in batch.groups] == [5, 5, 2] and batch.rows == list(range(12))
    assert batch.groups[1][0]["row"] == 5
    made = batcher().at(batch.groups[0], 0)
    assert made["image_grid_thw"].tolist() == [[1, 2, 2]] * 5
    assert batcher().micro_batch(batch.groups[0])["image_grid_thw"].tolist() == [[1, 8, 8]] * 5


def trainer_at(step: int, recipe: Path, *overrides: str) -> VLMSFTTrainer:
    """The part of a trainer that samples tier and configuration of a micro-batch."""
    trainer = VLMSFTTrainer.__new__(VLMSFTTrainer)
    trainer.config, trainer.global_step = config_of(recipe, *overrides), step
    trainer.space = ConfigurationSpace(("low", "medium", "high"), 4, 1, 4)
    return trainer


def test_tiers_and_configurations_depend_on_step_and_micro_batch(recipe: Path) -> None:
    overrides = ("configurations.lowest_tier_steps=3", "configurations.full_model_steps=5")
    draws = {
        step: [(each.tier(n), each.configuration(n)) for n in range(3)]
        for step in range(1, 40)
        for each in [trainer_at(step, recipe, *overrides)]
    }
    again = trainer_at(20, recipe, *overrides)
    assert draws[20] == [(again.tier(n), again.configuration(n)) for n in range(3)]
    full = again.space.full
    assert all(tier == 0 for step in range(1, 4) for tier, _ in draws[step])
    assert all(configuration == full for step in range(1, 6) for _, configuration in draws[step])
    later = [draw for step in range(6, 40) for draw in draws[step]]
    assert {tier for tier, _ in later} == {0, 1, 2}
    share = sum(configuration == full for _, configuration in later) / len(later)
    assert 0.15 < share < 0.55 and len({configuration.blocks for _, configuration in later}) == 8


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    text = "# of a vlm\nstage: vlm_sft\ndata: {datasets: {tiny: {val: 0, source: QUESTIONS}}}\n"
    path.write_text(text.replace("QUESTIONS", str(write_questions(tmp_path / "questions", 4, 0))))
    return path


def config_of(recipe: Path, *overrides: str) -> VLMSFTConfig:
    config = load_config("sft", [f"recipe={recipe}", *overrides])
    assert isinstance(config, VLMSFTConfig)
    return config


def test_model_is_required(recipe: Path) -> None:
    """verl's default is a language model."""
    with pytest.raises(UserError, match="^no model to train is given; set model.partial_pretrain to a vision-"):
        check_settings(config_of(recipe))


def test_accepts_recipe_without_validation(recipe: Path) -> None:
    config = config_of(recipe, "model.partial_pretrain=vlm")
    check_settings(config)
    check_questions(config, ("train",), ())
    assert config.stage == "vlm_sft"


def test_questions_per_chat_sets_chat_length(recipe: Path, tmp_path: Path) -> None:
    rows = [row(number) | {"image": row(0)["image"]} for number in range(6)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "questions/train.parquet")
    config = config_of(recipe, "data.questions_per_chat=3", "data.train_batch_size=2")
    train, val = load_image_chats(config.data)
    assert train.lengths.tolist() == [3, 3] and val is None
    with pytest.raises(UserError, match="there are 2 chats to train on, fewer than data.train_batch_size=3"):
        load_image_chats(config_of(recipe, "data.questions_per_chat=3", "data.train_batch_size=3").data)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("configurations.share=2", "must be a number from 0 to 1"),
        ("configurations.min_active=0", "must be an integer of at least 1"),
        ("data.questions_per_chat=0", "must be an integer of at least 1"),
        ("model.fsdp_config.keep_gathered=sometimes", "must be auto, true or false"),
        ("configurations.tier_weights=[1.0]", "for each of the tiers"),
        ("configurations.tier_weights=[0.0,0.0,0.0]", "not all of them 0"),
        ("configurations.tier_weights=[a,b,c]", "configurations.tier_weights' to .*must be a list .* of numbers"),
        ("configurations.tier_weights=[1,2,true]", "configurations.tier_weights' to .*must be a list .* of numbers"),
        ("configurations.tier_weights=[1.0,2.0,inf]", "configurations.tier_weights is .*numbers of at least 0"),
        ("configurations.tier_sizes=[a,b,c]", "configurations.tier_sizes' to .*must be a list .* of integers"),
        ("configurations.tier_sizes=[]", "configurations.tier_sizes is .*ascending integers"),
        ("configurations.topk_choices=[2.5]", "configurations.topk_choices' to .*must be a list .* of integers"),
        ("model.lora_rank=8", "model.lora_rank has no effect here; leave it at 0: vision-language models"),
        ("data.datasets.tiny.train=0", "there are no questions for train"),
    ],
)
def test_rejects_settings_that_cannot_work(override: str, message: str, recipe: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_questions(config_of(recipe, override), ("train",), ())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("model_dtype", ["fp32", "bf16"])
def test_validation_step_sees_images(model_dtype: str, recipe: Path, tmp_path: Path) -> None:
    """It computes in fp32, also with weights in bf16."""
    config = config_of(
        recipe,
        f"model.partial_pretrain={vlms.write_model(tmp_path / 'model')}",
        "model.mixed_precision=fp32",
        f"model.fsdp_config.model_dtype={model_dtype}",
        f"configurations.tier_sizes={list(TIERS)}",
        "configurations.topk_choices=[1,2,4]",
        "data.train_batch_size=2",
        "data.micro_batch_size_per_gpu=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.device=cpu",
    )
    train, _ = load_image_chats(config.data)
    trainer = VLMSFTTrainer(config, *build_meshes("cpu", 1), load_tokenizer(config), train, None)
    micro_batch = trainer.collator.micro_batch([train[0], train[1]])
    stored_dtype = PrecisionType.to_dtype(model_dtype)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=stored_dtype).float().eval()
    with torch.no_grad():
        logits = model(**{name: tensor for name, tensor in micro_batch.items() if name != "loss_mask"}).logits
    predicts = micro_batch["loss_mask"][:, 1:].bool()
    expected = F.cross_entropy(logits[:, :-1][predicts], micro_batch["input_ids"][:, 1:][predicts])
    assert trainer.validation_step(micro_batch).item() == pytest.approx(expected.item(), rel=1e-5)
