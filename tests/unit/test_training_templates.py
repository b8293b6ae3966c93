"""The shipped training templates, compared with the chats of their model families written out by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.data import dataset_of
from tests.helpers.models import make_tokenizer
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.data.chat_template import ChatTemplate
from verl_ext.data.training_templates import TEMPLATE_NAMES, read_chat_template, without_marks
from verl_ext.errors import UserError
from verl_ext.launch.preflight import check_components

Pieces = list[tuple[str, bool]]
"""Texts that follow one another, and whether each is learned."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é<"}}}
TEXT_CALL = {"name": "add", "arguments": '{"a": 2}'}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": "é<"}}\n</tool_call>\n' \
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'  # fmt: skip
ABOUT_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
SMOLLM3_TOOLS = (
    "### Tools\n\nYou may call one or more functions to assist with the user query.\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n\n<tools>\n"
    "{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\n<|im_end|>\n'
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
NO_THINK = {"enable_thinking": False}
QWEN3_ITSELF = (  # how Qwen3's own template treats reasoning: only what follows the last user turn keeps it
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def turn(role: str, text: str) -> Pieces:
    return [(f"<|im_start|>{role}\n{text}<|im_end|>\n", False)]


def answer(text: str, prompt: str = "") -> Pieces:
    """An assistant turn, including what the generation prompt appends to the opening line."""
    return [(f"<|im_start|>assistant\n{prompt}", False), (f"{text}<|im_end|>", True), ("\n", False)]


def smollm3_system(mode: str, instructions: str, end: str = "") -> Pieces:
    text = "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 08 July 2025\n"
    return [(f"{text}Reasoning Mode: /{mode}\n\n## Custom Instructions\n\n{instructions}\n\n{end}", False)]


THINKING = [
    user("1"),
    assistant("<think>\nso\n\nand so\n</think>\n\none"),
    user("2"),
    assistant("two", reasoning_content="hm"),
    user("3"),
    assistant("three"),
]
WITH_TOOLS = [
    system("Be brief."),
    user("1+2?"),
    assistant("I call", tool_calls=[CALL, TEXT_CALL]),
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
    assistant(None, tool_calls=[CALL, TEXT_CALL]),
    {"role": "tool", "content": "5"},
    assistant("five"),
]
PLAIN = [user("1"), assistant("one"), user("2"), assistant(" two\n")]
BOTH_RESPONSES = "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
ONE_RESPONSE = "\n<tool_response>\n5\n</tool_response><|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], Pieces]] = {
    "qwen3: each turn keeps its reasoning": (
        "qwen3_training",
        THINKING,
        {},
        turn("user", "1")
        + answer("<think>\nso\n\nand so\n</think>\n\none")
        + turn("user", "2")
        + answer("<think>\nhm\n</think>\n\ntwo")
        + turn("user", "3")
        + answer(f"{EMPTY}three"),
    ),
    "qwen3: without thinking the empty block is prompt": (
        "qwen3_training",
        [system("S"), *PLAIN],
        NO_THINK,
        turn("system", "S") + turn("user", "1") + answer("one", EMPTY) + turn("user", "2") + answer(" two\n", EMPTY),
    ),
    "qwen3: tools": (
        "qwen3_training",
        WITH_TOOLS,
        {"tools": [TOOL]},
        turn("system", f"Be brief.\n\n{ABOUT_TOOLS}")
        + turn("user", "1+2?")
        + answer(f"{EMPTY}I call\n{CALLS}")
        + [(f"<|im_start|>user{BOTH_RESPONSES}", False)]
        + answer(f"{EMPTY}{CALLS}")
        + [(f"<|im_start|>user{ONE_RESPONSE}", False)]
        + answer(f"{EMPTY}five"),
    ),
    "qwen2.5: the default system turn": (
        "qwen2.5_training",
        PLAIN,
        {},
        turn("system", QWEN) + turn("user", "1") + answer("one") + turn("user", "2") + answer(" two\n"),
    ),
    "qwen2.5: tools": (
        "qwen2.5_training",
        WITH_TOOLS,
        {"tools": [TOOL]},
        turn("system", f"Be brief.\n\n{ABOUT_TOOLS}")
        + turn("user", "1+2?")
        + answer(f"I call\n{CALLS}")
        + [(f"<|im_start|>user{BOTH_RESPONSES}", False)]
        + answer(CALLS)
        + [(f"<|im_start|>user{ONE_RESPONSE}", False)]
        + answer("five"),
    ),
    "smollm2: the default system turn": (
        "smollm2_training",
        PLAIN,
        {},
        turn("system", SMOLLM) + turn("user", "1") + answer("one") + turn("user", "2") + answer(" two\n"),
    ),
    "smollm2: a system turn": (
        "smollm2_training",
        [system("S"), *PLAIN[:2]],
        {},
        turn("system", "S") + turn("user", "1") + answer("one"),
    ),
    "smollm3: thinking": (
        "smollm3_training",
        [system("Be brief."), *THINKING],
        {},
        smollm3_system("think", "Be brief.")
        + turn("user", "1")
        + answer("<think>\nso\n\nand so\n</think>\n\none")
        + turn("user", "2")
        + answer("<think>\nhm\n</think>\ntwo")
        + turn("user", "3")
        + answer("three"),
    ),
    "smollm3: without thinking": (
        "smollm3_training",
        PLAIN,
        NO_THINK,
        smollm3_system("no_think", f"{SMOLLM}.")
        + turn("user", "1")
        + answer("one", "<think>\n\n</think>\n")
        + turn("user", "2")
        + answer(" two\n", "<think>\n\n</think>\n"),
    ),
    "smollm3: the system turn decides, with tools": (
        "smollm3_training",
        [system("Be brief. /no_think"), *WITH_TOOLS[1:4], WITH_TOOLS[-1]],
        {"tools": [TOOL]},
        smollm3_system("no_think", "Be brief.", SMOLLM3_TOOLS)
        + turn("user", "1+2?")
        + answer(f"I call\n{CALLS}", "<think>\n\n</think>\n")
        + turn("user", "3")
        + answer("five", "<think>\n\n</think>\n"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer, so that the tokens of concatenated texts are the concatenated tokens."""
    return make_tokenizer()


def template_of(tokenizer: PreTrainedTokenizerBase, name: str) -> ChatTemplate:
    tokenizer.chat_template = read_chat_template(name)
    return ChatTemplate(tokenizer, {})


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_mask_match_written_out_chat(case: str, tokenizer: PreTrainedTokenizerBase) -> None:
    name, chat, columns, pieces = CASES[case]
    template = template_of(tokenizer, name)
    assert template.render(chat, **columns) == "".join(text for text, _ in pieces)
    [encoded] = template.encode([chat], [columns])
    assert not isinstance(encoded, UserError)
    parts = [(tokenizer(text, add_special_tokens=False)["input_ids"], learned) for text, learned in pieces]
    assert encoded[0] == [token for tokens, _ in parts for token in tokens]
    assert encoded[1] == [int(learned) for tokens, learned in parts for _ in tokens]


@pytest.mark.parametrize("case", CASES)
def test_each_turn_follows_its_generation_prompt(case: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A model prompted with the beginning of a chat sees what it was trained on, also without generation marks."""
    name, chat, columns, pieces = CASES[case]
    template = template_of(tokenizer, name)
    whole = template.render(chat, **columns)
    learned_at = [sum(len(text) for text, _ in pieces[:at]) for at, (_, learned) in enumerate(pieces) if learned]
    turns = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
    for at, start in zip(turns, learned_at, strict=True):
        assert template.render(chat[:at], prompt=True, **columns) == whole[:start]
        assert whole.startswith(template.render(chat[: at + 1], **columns))
    plain = without_marks(tokenizer.chat_template)
    assert "% generation" not in plain and "% endgeneration" not in plain
    tokenizer.chat_template = plain
    assert ChatTemplate(tokenizer, {}).render(chat, **columns) == whole


@pytest.mark.parametrize(
    ("name", "chat", "columns", "says"),
    [
        ("qwen3_training", THINKING, NO_THINK, "enable_thinking is false"),
        ("qwen3_training", [user("1"), {"role": "critic", "content": "x"}, assistant("y")], {}, "no role critic"),
        ("qwen3_training", [user("1"), assistant("Hm. <think>a</think>b")], {}, "text before its reasoning"),
        ("qwen2.5_training", THINKING, {}, "reasoning_content"),
        ("smollm2_training", PLAIN, {"tools": [TOOL]}, "no place for tools"),
        ("smollm2_training", WITH_TOOLS, {}, "tool_calls"),
        ("smollm3_training", THINKING, NO_THINK, "/no_think"),
        ("smollm3_training", [*PLAIN, system("later")], {}, "the role system"),
    ],
)
def test_rejects_content_that_family_would_drop(
    name: str, chat: list, columns: dict, says: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    [refused] = template_of(tokenizer, name).encode([chat], [columns])
    assert isinstance(refused, UserError) and says in str(refused)


def test_rejects_lost_reasoning_and_suggests_template(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = QWEN3_ITSELF
    rows = [{"messages": [{**turn, "tool_calls": None} for turn in THINKING[:2] + THINKING[4:]]}]
    with pytest.raises(UserError, match="row 0 .* turn 1 .*data.chat_template=qwen3_training"):
        dataset_of(rows, tokenizer, tmp_path)
    tokenizer.chat_template = read_chat_template("qwen3_training")
    sample = dataset_of(rows, tokenizer, tmp_path)[0]
    learned = tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])
    assert learned == f"<think>\nso\n\nand so\n</think>\n\none<|im_end|>{EMPTY}three<|im_end|>"


def test_template_is_file_or_name_checked_by_launcher(quickstart: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template(str(path)) == read_chat_template("{{ messages }}")
    for name in TEMPLATE_NAMES:
        check_components(small_config(quickstart, tmp_path, f"data.chat_template={name}"))
    with pytest.raises(UserError, match="'qwen3_trainig', .*did you mean qwen3_training.*qwen2.5_training"):
        check_components(small_config(quickstart, tmp_path, "data.chat_template=qwen3_trainig"))
    with pytest.raises(UserError, match="/nowhere.jinja, which does not exist"):
        check_components(small_config(quickstart, tmp_path, "data.chat_template=/nowhere.jinja"))
    path.write_bytes(b"{\xff}")
    with pytest.raises(UserError, match="mine.jinja, which cannot be read"):
        read_chat_template(str(path))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("own", "exported"), [(QWEN3_ITSELF, QWEN3_ITSELF), (None, "smollm2_training"), (QWEN3_ITSELF, "smollm2_training")]
)
def test_exports_keep_model_template_unless_prompts_differ(
    own: str | None, exported: str, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": own}))
    name = exported if exported in TEMPLATE_NAMES else "qwen3_training"
    options = (f"model.partial_pretrain={model}", f"data.chat_template={name}", "data.max_length=512")
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", *options))
    trainer.save_checkpoint(1)
    export = AutoTokenizer.from_pretrained(tmp_path / "run/global_step_1/huggingface")
    assert trainer.tokenizer.chat_template == read_chat_template(name)
    assert export.chat_template == (without_marks(read_chat_template(name)) if exported in TEMPLATE_NAMES else own)
    assert (f"Exports use {name}" in capsys.readouterr().err) == (exported in TEMPLATE_NAMES)
