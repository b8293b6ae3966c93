"""Loss masks, row order and batches of the training data."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers.processors import ByteLevel
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl.utils.dataset.sft_dataset import SFTDataset

from tests.helpers.data import CHAT, dataset_of
from tests.helpers.models import make_tokenizer
from tests.helpers.trainer import small_config
from verl_ext.config.schema import as_dict
from verl_ext.data import chats
from verl_ext.data.batching import MicroBatchCollator, MicroBatchPlan, validation_micro_batches
from verl_ext.data.chat_template import ChatTemplate, check_messages
from verl_ext.data.chats import ChatDataset, load_chat_files, load_chats
from verl_ext.data.dataset import count_parquet_rows, drop_nulls, iter_parquet_rows, unique_sample_ids
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.errors import UserError

QWEN25_TEMPLATE = (  # the default system prompt makes turn-by-turn rendering of this family difficult
    "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n"
    "{% else %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL_TEMPLATE = (  # as thinking models do, earlier assistant turns lose their thoughts
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{% if loop.last %}(thought){% endif %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)

LLAMA3_TEMPLATE = (  # as first released: opens the assistant's turn even without add_generation_prompt
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|im_end|>' }}"
    "{% endfor %}{{ '<|im_start|>assistant<|end_header|>\n\n' }}"
)
DEEPSEEK_CODER_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n' }}"
    "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n' }}"
    "{% else %}{{ '### Response:\n' + m.content + '\n<|im_end|>\n' }}{% endif %}{% endfor %}{{ '### Response:\n' }}"
)
MISTRAL_TEMPLATE = (  # the prompt is a part of the user's turn
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
END_ONCE_TEMPLATE = MISTRAL_TEMPLATE.replace("<|im_end|>", "{% if loop.last %}<|im_end|>{% endif %}")
NO_END_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GLM_TEMPLATE = (  # the next turn's role ends an answer
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|endoftext|>' }}{{ m.content }}{% endfor %}"
)
PROMPTED_NO_END_TEMPLATE = NO_END_TEMPLATE + "{% if add_generation_prompt %}assistant:{% endif %}"

TOOLS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PAIRS = ("data.multiturn.enable=false", "data.prompt_key=prompt")


@pytest.fixture
def tokenizer(quickstart: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(quickstart / "model")


def trained_text(dataset: ChatDataset, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> str:
    sample = dataset[index]
    return tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])


@pytest.mark.parametrize("template", [None, QWEN25_TEMPLATE])
def test_loss_is_on_assistant_tokens_with_their_end_of_turn(
    template: str | None, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    dataset = dataset_of([{"messages": CHAT}], tokenizer, tmp_path)
    assert trained_text(dataset, tokenizer) == "def f(x):\n    return x<|im_end|>def g(x):\n    return 0<|im_end|>"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(dataset[0]["input_ids"]) == whole


def test_generation_tag_in_template_sets_loss_mask(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = MARKED_TEMPLATE
    dataset = dataset_of([{"messages": CHAT}], tokenizer, tmp_path)
    assert trained_text(dataset, tokenizer).endswith("(thought)def g(x):\n    return 0<|im_end|>")


def test_template_that_rewrites_earlier_turns_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    with pytest.raises(UserError, match=r"rows.parquet row 0 .*turn 1 differently.*\{% generation %\}"):
        dataset_of([{"messages": CHAT}], tokenizer, tmp_path)
    assert len(dataset_of([{"messages": CHAT[:2]}], tokenizer, tmp_path)) == 1


@pytest.mark.parametrize(
    ("template", "end", "has_prompt"),
    [
        (LLAMA3_TEMPLATE, "<|im_end|>", True),
        ("{% set _ = messages[0].role == 'system' or raise_exception('') %}" + LLAMA3_TEMPLATE, "<|im_end|>", True),
        (DEEPSEEK_CODER_TEMPLATE, "\n<|im_end|>", True),
        (GLM_TEMPLATE + "<|endoftext|>", "", True),
        (NO_END_TEMPLATE + "assistant:", "", True),
        (MISTRAL_TEMPLATE, "<|im_end|>", False),
        (PROMPTED_NO_END_TEMPLATE, "", False),
    ],
)
def test_loss_excludes_generation_prompt(
    template: str, end: str, has_prompt: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.chat_template = template
    system = [{"role": "system", "content": "S"}] if "raise_exception" in template else []
    for chat in (CHAT[:2], CHAT):
        dataset = dataset_of([{"messages": system + chat}], tokenizer, tmp_path)
        answers = [turn["content"] + end for turn in chat if turn["role"] == "assistant"]
        assert trained_text(dataset, tokenizer).replace(" def", "def") == "".join(answers)
    assert bool(ChatTemplate(tokenizer, {}).unconditional_prompt) == has_prompt


def test_loss_includes_end_that_only_last_turn_has(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = END_ONCE_TEMPLATE
    assert trained_text(dataset_of([{"messages": CHAT[:2]}], tokenizer, tmp_path), tokenizer).endswith(
        "return x<|im_end|>"
    )


def test_generation_prompt_that_answers_lack_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Templates of thinking models open the reasoning, and write answers without it."""
    tokenizer.chat_template = QWEN25_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    says = r"generation prompt ends with '<think>\\n', which .* before the answer in turn 1; set data.chat_template"
    with pytest.raises(UserError, match=says):
        dataset_of([{"messages": CHAT}], tokenizer, tmp_path)


def test_template_with_ambiguous_end_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }} [END] {% endfor %}# assistant:"
    with pytest.raises(UserError, match="row 0 cannot be used: .*ends every chat.*data.chat_template"):
        dataset_of([{"messages": CHAT[:2]}], tokenizer, tmp_path)


@pytest.mark.parametrize("trims", [False, True])
def test_loss_includes_all_bytes_of_last_character(trims: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()  # a token for each byte
    tokenizer.chat_template = PROMPTED_NO_END_TEMPLATE
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trims)
    rows = [
        {"messages": [{"role": "user", "content": "été"}, {"role": "assistant", "content": f"a {end}"}]}
        for end in "é😀"
    ]
    dataset = dataset_of(rows, tokenizer, tmp_path)
    assert [trained_text(dataset, tokenizer, index).lstrip() for index in range(2)] == ["a é", "a 😀"]


def test_prompt_response_data_trains_end_of_turn_unlike_verl(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"question": "Write f.", "answer": "def f(x):\n    return x"}] * 2  # verl's dataset crashes on a single row
    ours = dataset_of(rows, tokenizer, tmp_path, "data.multiturn.enable=false")
    assert trained_text(ours, tokenizer) == "def f(x):\n    return x<|im_end|>"
    config = OmegaConf.create(as_dict(small_config(tmp_path, tmp_path, "data.multiturn.enable=false").data))
    stock = SFTDataset(str(tmp_path / "rows.parquet"), tokenizer, config)[0]
    # verl's trainer takes loss_mask[:, 1:] for the target of each position, so a target counts by its own mask
    targets = tokenizer.decode(stock["input_ids"][1:][stock["loss_mask"][1:].bool()])
    assert not targets.endswith("<|im_end|>")
    assert targets.startswith("\n")  # the end of the prompt, which the model does not generate
    assert len(stock["input_ids"]) == config.max_length  # verl pads each row to max_length
    assert len(ours[0]["input_ids"]) < 40


def test_too_long_and_invalid_rows_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"messages": CHAT[:2]}, {"messages": CHAT}]
    with pytest.raises(UserError, match="row 1 cannot be used: it has .* more than data.max_length=40"):
        dataset_of(rows, tokenizer, tmp_path, "data.max_length=40")
    for side in ("left", "right"):
        short = dataset_of(rows, tokenizer, tmp_path, "data.max_length=40", f"data.truncation={side}")
        assert list(short.lengths) == [short.lengths[0], 40]
    with pytest.raises(UserError, match="no assistant turn"):
        dataset_of([{"messages": CHAT[:1]}], tokenizer, tmp_path)
    for names, chat in {
        "begins with the assistant": [CHAT[1]],
        "turn 0 has no role; set it": [{"content": "x"}, CHAT[1]],
        "turn 0 has no role; convert .*prepare chat --input": [{"from": "human", "value": "x"}],
        "is null; drop the row, or convert .*--skip-bad": None,
        "turn 1 is an empty assistant turn; drop the row, or convert .*--skip-bad": [
            CHAT[0],
            {**CHAT[1], "content": " "},
        ],
        "not a list of turns .*prepare chat --input FILE --skip-bad --output DIR": [],
        "turn 0 has content that is not text": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, CHAT[1]],
        "not a list of turns .*prepare chat --input FILE --output DIR": "not a chat",
    }.items():
        with pytest.raises(UserError, match=f"row 0 cannot be used: .*{names}"):
            write_and_read([{"messages": chat}], tokenizer, tmp_path)
    with pytest.raises(UserError, match="no content"):
        dataset_of([{"messages": [CHAT[0], {"role": "assistant", "content": None}]}], tokenizer, tmp_path)
    with pytest.raises(UserError, match="token to train on"):
        dataset_of(rows[:1], tokenizer, tmp_path, "data.max_length=5", "data.truncation=right")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template; set data.chat_template"):
        dataset_of(rows, tokenizer, tmp_path)


def write_and_read(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> ChatDataset:
    """Like `dataset_of`, for turns with contents of several types, which one parquet column cannot hold."""
    config = small_config(tmp_path, tmp_path).data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chats, "count_parquet_rows", lambda path: len(rows))
        patch.setattr(chats, "iter_parquet_rows", lambda path: iter(rows))
        return ChatDataset("rows.parquet", tokenizer, config)


def test_text_parts_are_joined(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "f."}]
    dataset = write_and_read([{"messages": [{"role": "user", "content": parts}, CHAT[1]]}], tokenizer, tmp_path)
    whole = dataset_of([{"messages": CHAT[:2]}], tokenizer, tmp_path)
    assert dataset[0]["input_ids"].tolist() == whole[0]["input_ids"].tolist()


@pytest.mark.parametrize("arguments", [{"x": "a"}, '{"x": "a"}'])
def test_tool_call_arguments_are_rendered_as_object(
    arguments: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """JSON text would be encoded twice, and a template without tool calls would drop them."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]}]
    with pytest.raises(UserError, match="row 0 cannot be used: it has tool_calls.*data.chat_template"):
        dataset_of(rows, tokenizer, tmp_path)
    tokenizer.chat_template = TOOLS_TEMPLATE
    assert trained_text(dataset_of(rows, tokenizer, tmp_path), tokenizer) == 'f({"x": "a"})<|im_end|>'


@pytest.mark.parametrize("tools", [[{"type": "function", "function": {"name": "f"}}], '[{"name": "f"}]'])
def test_tools_that_template_omits_are_rejected(tools: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    dataset_of([{"messages": CHAT, "tools": "[]", "enable_thinking": True}], tokenizer, tmp_path)
    with pytest.raises(UserError, match="row 0 cannot be used: it has tools.*data.chat_template"):
        dataset_of([{"messages": CHAT, "tools": tools}], tokenizer, tmp_path)


@pytest.mark.parametrize("tools", [[], "[]", ""])
def test_empty_tools_count_as_none(tools: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Llama 3.1's template tests whether tools are none, and would ask the model to call one of no tools."""
    tokenizer.chat_template = (
        "{% if tools is defined and tools is not none %}Call one of {{ tools }}.\n{% endif %}" + QWEN25_TEMPLATE
    )
    expected = dataset_of([{"messages": CHAT}], tokenizer, tmp_path)[0]["input_ids"].tolist()
    assert dataset_of([{"messages": CHAT, "tools": tools}], tokenizer, tmp_path)[0]["input_ids"].tolist() == expected


def test_system_turn_that_template_omits_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"messages": [{"role": "system", "content": "Be brief."}, *CHAT]}]
    dataset_of(rows, tokenizer, tmp_path)
    loop = "for message in messages"
    assert loop in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(loop, f"{loop} if message.role != 'system'")
    dataset_of(rows[:1], tokenizer, tmp_path)
    with pytest.raises(
        UserError, match="row 1 cannot be used: .* omits the text of turn 0, whose role is system; .*data.chat_template"
    ):
        dataset_of(rows, tokenizer, tmp_path)


FIRST_SYSTEM_TEMPLATE = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant', 'ipython'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like the templates of GPT-OSS and Qwen3-VL, it renders only a first system turn."""
FIRST, LATER = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Now in French."}
QUESTION, ANSWER = {"role": "user", "content": "Write f."}, {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([FIRST, QUESTION, ANSWER, QUESTION, ANSWER], None),
        ([FIRST, QUESTION, ANSWER, LATER, QUESTION, ANSWER], "omits the text of turn 3, whose role is system"),
        ([FIRST, LATER, QUESTION, ANSWER], "omits the text of turn 1, whose role is system"),
        ([FIRST, {"role": "system", "content": " "}, QUESTION, ANSWER], None),
        ([QUESTION, ANSWER, {"role": "tool", "content": "3"}, ANSWER], "omits the text of turn 2, whose role is tool"),
        ([{**QUESTION, "role": "User"}, ANSWER], "turn 0 has the role 'User'; set it to system, user, "),
        ([QUESTION, {**QUESTION, "role": "ipython"}, ANSWER], None),  # the template knows it
        ([{**LATER, "role": "developer"}, QUESTION, ANSWER], None),
        ([FIRST, {**LATER, "role": "developer"}, QUESTION, ANSWER], "both system and developer turns"),
    ],
)
def test_turns_that_template_omits_are_rejected(
    chat: list[dict[str, Any]], says: str | None, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The position of a turn matters, so a chat of other roles before it makes no difference."""
    tokenizer.chat_template = FIRST_SYSTEM_TEMPLATE
    rows = [{"messages": [FIRST, QUESTION, ANSWER]}, {"messages": chat}]
    with pytest.raises(UserError, match=f"row 1 cannot be used: .*{says}") if says else nullcontext():
        text = tokenizer.decode(dataset_of(rows, tokenizer, tmp_path)[1]["input_ids"])
        assert all(turn["content"].strip() in text for turn in chat)


def test_chats_of_same_roles_are_checked_with_one_rendering(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, rendered = ChatTemplate(tokenizer, {}), []
    apply = ChatTemplate._apply
    monkeypatch.setattr(ChatTemplate, "_apply", lambda *args: rendered.append(args) or apply(*args))
    for text in ("a", "b", "c"):
        template.require_rendered([{**QUESTION, "content": text}, ANSWER])
    assert len(rendered) == 1
    template.require_rendered([FIRST, QUESTION, ANSWER])
    assert len(rendered) == 2


R1_TEMPLATE = (  # like DeepSeek-R1-Distill's
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
QWEN3_TEMPLATE = (  # keeps the reasoning of the last turn
    "{% for m in messages %}<{{ m.role }}>{% set content = m.content %}{% if m.role == 'assistant' %}"
    "{% set parts = content.split('</think>') %}"
    "{% if loop.last %}<think>{{ parts[0].split('<think>')[-1] if parts | length > 1 }}</think>{% endif %}"
    "{% set content = parts[-1] %}{% endif %}{{ content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "is_whole"),
    [
        (R1_TEMPLATE, "Done.", True),
        (R1_TEMPLATE, "<think>\n</think>Done.", True),
        (R1_TEMPLATE, "<think>It is easy.</think>Done.", False),
        (R1_TEMPLATE, "It is easy.</think>Done.", False),
        (QWEN3_TEMPLATE, "<think>It is easy.</think>Done.", True),
        (QWEN3_TEMPLATE, "Hm. <think>It is easy.</think>Done.", False),
        (QWEN3_TEMPLATE, "<think>a</think>It is easy.</think>Done.", False),
        (MISTRAL_TEMPLATE, "Hm. <think>It is easy.</think>Done.", True),
    ],
)
@pytest.mark.parametrize("later", [[], [QUESTION, ANSWER]])
def test_reasoning_that_template_omits_is_rejected(
    template: str, content: str, is_whole: bool, later: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """A template that drops the reasoning of an earlier turn is rejected elsewhere, unless it marks answers."""
    tokenizer.chat_template = template
    checked = ChatTemplate(tokenizer, {})
    checked.require_rendered([QUESTION, ANSWER, *later])
    chat = [QUESTION, {**ANSWER, "content": content}, *later]
    says = "omits reasoning or other text of turn 1, whose role is assistant"
    with nullcontext() if is_whole else pytest.raises(UserError, match=says):
        checked.require_rendered(chat)
    checked.require_rendered([*chat, QUESTION], prompt=True)


def test_template_may_drop_text_of_earlier_assistant_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """GPT-OSS renders the text before a tool call only until the answer, because it is reasoning."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or not m.tool_calls %}{{ m.content }}{% endif %}"
        "{{ m.tool_calls }}{% endfor %}"
    )
    call = {"role": "assistant", "content": "I call f.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    ChatTemplate(tokenizer, {}).require_rendered([QUESTION, call, ANSWER])


def test_converted_row_is_named_by_its_origin(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "converted_from": "mine.jsonl row 7"}]
    with pytest.raises(UserError, match=r"mine\.jsonl row 7 \(.*rows\.parquet row 0\) cannot be used"):
        dataset_of(rows, tokenizer, tmp_path, "data.max_length=40")


def test_loss_mask_is_independent_of_trim_offsets(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    expected = dataset_of([{"messages": CHAT}], tokenizer, tmp_path)[0]["loss_mask"].tolist()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    assert dataset_of([{"messages": CHAT}], tokenizer, tmp_path)[0]["loss_mask"].tolist() == expected


def test_multiple_files_and_max_samples_keep_row_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    names = []
    for part in range(2):
        names.append(str(tmp_path / f"{part}.parquet"))
        pd.DataFrame([{"messages": CHAT[:2]}] * 3).to_parquet(names[-1])
    config = small_config(tmp_path, tmp_path).data
    dataset = ChatDataset(names, tokenizer, config, max_samples=4)
    assert len(dataset) == 4
    assert dataset.describe([1, 2, 3]) == f"{names[0]} rows 1, 2; {names[1]} rows 0"


def test_padding_of_custom_dataset_class_is_removed(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pd.DataFrame([{"question": "Write f.", "answer": "return x"}] * 2).to_parquet(tmp_path / "own.parquet")
    code = tmp_path / "own.py"
    code.write_text("from verl.utils.dataset.sft_dataset import SFTDataset\nclass Own(SFTDataset): pass\n")
    custom = (f"data.custom_cls.path={code}", "data.custom_cls.name=Own")
    config = small_config(tmp_path, tmp_path, "data.multiturn.enable=false", *custom).data
    dataset = load_chat_files(str(tmp_path / "own.parquet"), config, tokenizer)
    assert dataset.lengths[0] == len(dataset[0]["input_ids"]) < config.max_length
    assert dataset.describe([0]) == "Own rows 0"


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (NO_END_TEMPLATE, "assistant:"),
        (DEEPSEEK_CODER_TEMPLATE.rpartition("{{")[0], "### Response:"),
        ("{{ raise_exception('') if messages[0].role != 'system' }}" + NO_END_TEMPLATE, "assistant:"),
        *((each, "") for each in (QWEN25_TEMPLATE, FORGETFUL_TEMPLATE, MARKED_TEMPLATE, LLAMA3_TEMPLATE)),
        *((each, "") for each in (DEEPSEEK_CODER_TEMPLATE, MISTRAL_TEMPLATE, PROMPTED_NO_END_TEMPLATE, "{% raw")),
    ],
)
def test_trained_header_is_warned_of_once(
    template: str, header: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.chat_template = template
    assert ChatTemplate(tokenizer, {}).trained_header == header
    system = {"role": "system", "content": "s"}
    pd.DataFrame({"messages": [[system, *CHAT[:2]]] * 2}).to_parquet(tmp_path / "rows.parquet")
    data = [f"data.{key}_files={tmp_path}/rows.parquet" for key in ("train", "val")]
    config = small_config(tmp_path, tmp_path, *data, f"data.token_cache={tmp_path}").data
    if header:
        for _ in range(2):  # the second time from the cache
            load_chats(config, tokenizer, progress=True)
            assert capsys.readouterr().err.count(f"so {header!r} before each answer is trained on") == 1


def test_truncated_samples_are_counted_from_cache_too(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long_prompt, long_answer = (
        [{**CHAT[0], "content": "x " * 400}, CHAT[1]],
        [CHAT[0], {**CHAT[1], "content": "x " * 400}],
    )
    names = [str(tmp_path / "one.parquet"), str(tmp_path / "two.parquet")]
    for name, rows in zip(names, [[CHAT[:2], long_answer], [CHAT[:2], long_prompt, long_prompt]]):
        pd.DataFrame({"messages": rows}).to_parquet(name)
    words = ["data.max_length=60", "data.truncation=right", f"data.token_cache={tmp_path / 'cache'}"]
    config = small_config(tmp_path, tmp_path, *words).data
    expected = (
        f"warning: 3 of 5 samples of {', '.join(names)} are truncated at data.max_length=60, and 2 have no token to "
        f"train on (first: row 1 of {names[1]}); raise data.max_length\n"
    )
    for _ in range(2):
        assert len(load_chat_files(names, config, tokenizer, progress=True)) == 5
        assert capsys.readouterr().err == expected
    load_chat_files(names, config, tokenizer)  # as other ranks do
    load_chat_files(names[0], config, tokenizer, max_samples=1, progress=True)
    assert capsys.readouterr().err == ""
    load_chat_files(names[0], config, tokenizer, progress=True)
    assert capsys.readouterr().err.endswith("one.parquet are truncated at data.max_length=60; raise data.max_length\n")


def test_unmarked_answers_are_counted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content != 'no' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    pd.DataFrame({"messages": [CHAT, [CHAT[0], {**CHAT[1], "content": "no"}]]}).to_parquet(tmp_path / "rows.parquet")
    config = small_config(tmp_path, tmp_path, f"data.token_cache={tmp_path / 'cache'}").data
    load_chat_files(str(tmp_path / "rows.parquet"), config, tokenizer, progress=True)
    assert "1 of 2 samples of" in (said := capsys.readouterr().err) and "no token to train on (first: row 1)" in said


def test_file_without_loss_tokens_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.parquet has a token to train on"):
        dataset_of([{"messages": CHAT}], tokenizer, tmp_path, "data.max_length=1", "data.truncation=left")
    code = tmp_path / "own.py"
    code.write_text(
        "from verl.utils.dataset.sft_dataset import SFTDataset\n"
        "class Own(SFTDataset):\n"
        "    def __getitem__(self, item):\n"
        "        sample = super().__getitem__(item)\n"
        "        return {**sample, 'loss_mask': sample['loss_mask'] * 0}\n"
    )
    pd.DataFrame([{"question": "Write f.", "answer": "return x"}] * 2).to_parquet(tmp_path / "own.parquet")
    custom = (f"data.custom_cls.path={code}", "data.custom_cls.name=Own")
    config = small_config(tmp_path, tmp_path, "data.multiturn.enable=false", *custom).data
    with pytest.raises(UserError, match=r"Own of data\.custom_cls .*own\.parquet"):
        load_chat_files(str(tmp_path / "own.parquet"), config, tokenizer)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "a", "b", "a"], ["a", "a#2", "b", "a#3"]),
        (["a", "a#2", "a"], ["a", "a#2", "a#3"]),
        (["a", "a", "a#2"], ["a", "a#2", "a#2#2"]),
        (["a", "a", "a#2", "a#2", "a#2#2"], ["a", "a#2", "a#2#2", "a#2#3", "a#2#2#2"]),
    ],
)
def test_duplicate_sample_ids_are_made_unique(given: list[str], expected: list[str]) -> None:
    assert list(unique_sample_ids(given)) == expected
    assert len(set(expected)) == len(expected)


def test_global_batches_are_same_for_any_number_of_ranks() -> None:
    plan = MicroBatchPlan(np.arange(1, 104), packs=True, max_tokens=120)

    def batches(ranks: int, plan: MicroBatchPlan | None) -> list[list[int]]:
        parts = [list(GlobalBatchSampler(103, 12, rank, ranks, 1, plan)) for rank in range(ranks)]
        return [sum((sum(share, []) if plan else share for share in step), []) for step in zip(*parts)]

    assert batches(1, None) == batches(2, None) == batches(4, None)
    seen = sum(batches(1, None), [])
    assert len(seen) == len(set(seen)) == 96
    for ranks in (1, 2, 4):
        assert [sorted(step) for step in batches(ranks, plan)] == [sorted(step) for step in batches(1, None)]


def test_mini_batches_are_same_for_any_number_of_ranks() -> None:
    (whole,) = GlobalBatchSampler(8, 8, 0, 1, 1, num_mini_batches=2)
    parts = [next(iter(GlobalBatchSampler(8, 8, rank, 2, 1, num_mini_batches=2))) for rank in range(2)]
    for start in (0, 4):
        assert sum((part[start // 2 : start // 2 + 2] for part in parts), []) == whole[start : start + 4]


def test_sampler_resumes_at_any_position_and_epoch_end() -> None:
    whole = GlobalBatchSampler(30, 10, 0, 1, seed=3)
    seen, states = [], []
    for _ in range(3):
        for batch in list(whole):
            seen.append(batch)
            whole.advance()
            states.append(whole.state_dict())
    assert sorted(sum(seen[:3], [])) == list(range(30))
    assert seen[:3] != seen[3:6]  # each epoch has its own order
    for step, state in enumerate(states[:-1], start=1):
        resumed = GlobalBatchSampler(30, 10, 0, 1, seed=3)
        resumed.load_state_dict(state)
        assert next(iter(resumed)) == seen[step]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_samples": 31}, "saved with 31 training samples, but this run has 30, .*; restore the training data, or"),
        ({"seed": 4}, "saved with trainer.seed=4, but this run has 3, .*; set trainer.seed=4, or start a new run"),
    ],
)
def test_sampler_rejects_state_of_another_dataset(change: dict[str, int], names: str) -> None:
    sampler = GlobalBatchSampler(30, 10, 0, 1, seed=3)
    with pytest.raises(UserError, match=names):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(UserError, match="or start from its weights$"):
        sampler.load_state_dict({**sampler.state_dict(), **change}, "start from its weights")
    with pytest.raises(UserError, match="not a multiple of"):
        sampler.load_state_dict({**sampler.state_dict(), "samples_seen": 5})
    with pytest.raises(UserError, match="fewer than one global batch"):
        GlobalBatchSampler(5, 10, 0, 1, seed=3)


def samples(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {"input_ids": torch.arange(1, n + 1), "loss_mask": torch.ones(n, dtype=torch.long), "row": row}
        for row, n in enumerate(lengths)
    ]


def test_micro_batch_is_padded_to_its_longest_sample() -> None:
    three, nine, four, eight, two = samples([3, 9, 4, 8, 2])
    batch = MicroBatchCollator(pad_token_id=0, packs=False)([[nine, eight], [four, three], [two]])
    assert [tuple(part["input_ids"].shape) for part in batch.micro_batches] == [(2, 9), (2, 4), (1, 2)]
    assert batch.lengths == [9, 8, 4, 3, 2]
    assert batch.num_loss_tokens == 26 - 5
    assert batch.rows == [1, 3, 2, 0, 4]
    second = batch.micro_batches[1]
    assert second["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 3, 0]]
    assert second["attention_mask"].tolist() == second["loss_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]


def test_packed_samples_restart_positions_and_mask_first_token() -> None:
    batch = MicroBatchCollator(pad_token_id=0, packs=True)([samples([3, 2])])
    [row] = batch.micro_batches
    assert row["input_ids"].tolist() == [[1, 2, 3, 1, 2]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["loss_mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert batch.lengths == row["sample_lengths"].tolist() == [3, 2]
    assert batch.num_loss_tokens == 3


class Listed(list):
    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(sample["input_ids"]) for sample in self])


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_validation_drops_no_sample_and_keeps_ranks_in_sync(ranks: int, packs: bool) -> None:
    dataset = Listed(samples([3, 9, 4, 8, 2, 7, 5]))
    plan, make = MicroBatchPlan(dataset.lengths, packs, max_tokens=12), MicroBatchCollator(0, packs).micro_batch
    assigned = plan.assign(range(len(dataset)), ranks)
    parts = [list(validation_micro_batches(dataset, assigned, make, rank)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    counted = sum(int(micro["loss_mask"][:, 1:].sum()) for part in parts for micro in part)
    assert counted == dataset.lengths.sum() - len(dataset)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "no column 'messages' .data.multiturn.messages_key.; its columns are prompt, response; set data"),
        (
            PAIRS,
            "no column 'answer' .data.response_key.; its columns are prompt, response; set data.response_key to one",
        ),
        (
            (*PAIRS, "data.response_key=response", "data.response_dict_keys=[a,c]"),
            "no field 'c'; its fields there are b; correct data.prompt_dict_keys or data.response_dict_keys",
        ),
        ((*PAIRS, "data.response_key=prompt", "data.response_dict_keys=[a]"), "no field 'a'; it is not a struct"),
    ],
)
def test_row_without_required_column_or_field_is_rejected(
    overrides: tuple[str, ...], says: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"row 0 cannot be used: it has {says}"):
        dataset_of([{"prompt": "q", "response": {"a": {"b": "c"}}}], tokenizer, tmp_path, *overrides)


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_dropped(calls: list[Any] | None) -> None:
    """Llama 3.1's template tests only whether a turn has the key."""
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": calls}]
    assert "tool_calls" not in check_messages(chat)[1]


def test_check_messages_does_not_modify_row() -> None:
    """Error messages may show the row, and data preparation writes the checked rows."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "Call "}, {"type": "text", "text": "f."}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(chat)
    checked = check_messages(chat)
    assert chat == before
    assert checked[0]["content"] == "Call f."
    assert checked[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([], "its column 'prompt' is not a list of turns"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "its last turn is the assistant's"),
        ([{"role": "user", "content": None}], "turn 0 has no content"),
    ],
)
def test_prompt_must_end_before_assistant_turn(chat: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_messages(chat, "prompt", is_prompt=True)
    asked = [{"role": "user", "content": "q"}]
    assert check_messages(asked, "prompt", is_prompt=True) == asked


def test_parquet_rows_keep_python_types(tmp_path: Path) -> None:
    """A null in an integer column does not turn the other values into floats."""
    rows = [{"id": 2**60 + 1, "nested": {"a": 1, "b": None}, "texts": ["x", None]}, {"id": None, "nested": None}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = list(iter_parquet_rows(path, batch_size=1))
    assert read == [rows[0], {**rows[1], "texts": None}] and type(read[0]["id"]) is int
    assert drop_nulls(read[0]) == {"id": 2**60 + 1, "nested": {"a": 1}, "texts": ["x", None]}
    assert list(iter_parquet_rows(path, ["nested.a"])) == [{"nested": {"a": 1}}, {"nested": None}]
    assert count_parquet_rows(path) == 2


def test_pandas_index_column_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"id": [1, 2, 3], "a": [{"b": 0}] * 3}).iloc[[1, 2, 0]].to_parquet(path)
    assert "__index_level_0__" in pyarrow.parquet.read_schema(path).names
    assert list(iter_parquet_rows(path)) == [{"id": number, "a": {"b": 0}} for number in (2, 3, 1)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_yields_planned_micro_batches(
    num_workers: int, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    dataset = dataset_of([{"messages": CHAT[:2]}, {"messages": CHAT}] * 4, tokenizer, tmp_path)
    plan = MicroBatchPlan(dataset.lengths, packs=True, max_tokens=int(dataset.lengths.max()))
    sampler = GlobalBatchSampler(8, 4, 0, 1, 1, plan)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=MicroBatchCollator(0, packs=True)
    )
    for batch, micro_batches in zip(loader, sampler, strict=True):
        assert batch.rows == [row for rows in micro_batches for row in rows]
        shapes = [tuple(part["input_ids"].shape) for part in batch.micro_batches]
        assert shapes == [(1, dataset.lengths[rows].sum()) for rows in micro_batches]


@pytest.mark.parametrize("weight", [None, 1, 1.0, float("nan")])
def test_message_weight_without_effect_is_accepted(weight: float | None) -> None:
    """A parquet file may hold NaN for a missing weight, and only assistant turns are trained on."""
    chat = [{"role": "user", "content": "q", "weight": 0}, {"role": "assistant", "content": "a", "weight": weight}]
    assert [turn["content"] for turn in check_messages(chat)] == ["q", "a"]


def test_zero_weight_of_assistant_turn_is_rejected() -> None:
    with pytest.raises(UserError, match="turn 1 has weight 0"):
        check_messages([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}])
