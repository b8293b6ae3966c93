"""Digests and seeds that identify runs, evaluations and caches have their recorded values.

A changed value breaks resuming runs, restarts every evaluation, or invalidates cached files.

`SNAPSHOT_UPDATE=1 bash tests/run.sh unit tests/unit/test_snapshots_digests.py` records `tests/data/snapshots/digests/`
again, and fails. The literals below are to be edited by hand. `tests/data/snapshots/inputs/` is never written again:
its bytes count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.helpers.checkpoints import make_export
from tests.helpers.snapshots import (
    SNAPSHOTS,
    answer_seed,
    check_snapshot,
    completion_seed,
    config_digest_of,
    evaluation_digests,
    model_fingerprint,
    problems_digest_of,
    recipes_of,
    run_modules,
    sample_ids,
    token_numbers,
    tokenize,
    training_data_digest_of,
)

INPUTS = SNAPSHOTS / "inputs"
PROBLEMS: dict[str, dict[str, Any]] = {
    "quickstart": {"problem_id": "p1", "prompt": "Write f.", "entry_point": "f", "tests": ["assert f() == 1"]},
    "humaneval": {
        **{"task_id": "HumanEval/900", "prompt": 'def f(x):\n    """Half."""\n', "entry_point": "f"},
        **{"canonical_solution": "    return x / 2\n", "test": "def check(candidate):\n    assert candidate(4) == 2\n"},
    },
    "mbpp": {"task_id": 7, "text": "One.", "code": "def f():\n    return 1\n", "test_list": ["assert f() == 1"]},
    "codecontests": {"name": "c", "description": "Add.", "public_tests": {"input": ["1 2"], "output": ["3"]}},
    "gsm8k": {"question": "How many?", "answer": "So many.\n#### 1,042"},
    "verl": {"prompt": "How many?", "reward_model": {"ground_truth": "12"}, "extra_info": {"problem_id": "v/1"}},
}
"""A row of each format."""
WORDS = ("<unk>", "<s>", "<e>", "user", "assistant", "write", "def", "f", "g", "h")
COMPLETIONS = [663873067, 1983421547, 385387575]
ANSWERS = [865546379, 1653333143, 1806633247]
NUMBERS = [0.27938043, 0.273693714, 0.862092961]
TEMPLATE = (
    "{% for message in messages %}<s> {{ message.role }} {{ message.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    """A tokenizer of ten words, which does not depend on library releases."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<e>", pad_token="<unk>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the library releases that are part of a cache key to the recorded ones."""
    from verl_ext.data import chats

    monkeypatch.setattr(chats.transformers, "__version__", "5.0.0")
    monkeypatch.setattr(chats.tokenizers, "__version__", "0.20.0")


def test_config_digests_match_record() -> None:
    found = {
        f"{command}/{name}": config_digest_of(command, f"recipe={name}")
        for command in ("sft", "grpo")
        for name in recipes_of(command)
    }
    check_snapshot("digests/config.json", found)


def test_evaluation_digests_match_record(tmp_path: Path) -> None:
    """Of one model; `test_evaluation_digests_are_stable_across_releases` has those of the quickstart."""
    checkpoint = make_export(tmp_path / "run" / "global_step_3" / "huggingface").parent
    files = {"huggingface/model.safetensors": {"bytes": 1, "xxh3_128": "0" * 32}, "model.pt": {"bytes": 2}}
    manifest = {"format": 1, "step": 3, "world_size": 1, "config_digest": "", "files": files, "metrics": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    names = [name for name in recipes_of("eval") if name != "quickstart"]
    check_snapshot("digests/evaluation.json", {name: evaluation_digests(name, checkpoint) for name in names})


def test_problem_digests_match_record(tmp_path: Path) -> None:
    found = {}
    for format, row in PROBLEMS.items():
        path = tmp_path / f"{format}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        found[format] = problems_digest_of(format, path)
    check_snapshot("digests/problems.json", found)


def test_training_data_digest_matches_record() -> None:
    names = (INPUTS / "chats.parquet", INPUTS / "prompts.parquet")
    assert training_data_digest_of(*names) == "dd1d18dab63b781f96ba2c36124b19bd"


@pytest.mark.usefixtures("releases")
def test_token_cache_key_matches_record(tokenizer: Any, tmp_path: Path) -> None:
    words = (
        *(f"data.train_files={INPUTS}/chats.parquet", "data.val_files=null", f"data.token_cache={tmp_path}"),
        *("data.multiturn.enable=true", "data.max_length=64"),
    )
    samples = tokenize(words, tokenizer)
    assert samples[0] == {"input_ids": [1, 3, 5, 7, 2, 1, 4, 6, 7, 2], "loss_mask": [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]}
    [kept] = tmp_path.iterdir()
    assert kept.name == "511bbcc648571c9c42f0b84ed12aaf8fbe81e3f796c128692da771f5ec410763.arrow"
    tokenize((*words, "data.train_max_samples=1"), tokenizer)
    assert len(list(tmp_path.iterdir())) == 2


def test_prompt_ids_match_record(tokenizer: Any) -> None:
    found = sample_ids({"train_files": INPUTS / "prompts.parquet", "val_files": "null"}, tokenizer)
    assert found == ["named/1", "prompts/1", "named/1#2"]


def test_conversion_directories_match_record() -> None:
    commands = [
        ["verl_ext.launch", command, "--print-config", f"data.train_files={(INPUTS / name).relative_to(ROOT)}"]
        for command, name in (("sft", "chats.jsonl"), ("grpo", "prompts.jsonl"))
    ]
    found = [re.findall(r"--output (data/\S+)", output)[0] for output in run_modules(commands)]
    assert found == ["data/chats-f7f423abaede", "data/prompts-a0ed20af8cbb"]


def test_sample_seeds_match_record() -> None:
    assert [completion_seed(42, step, "named/1", number) for step, number in ((1, 0), (1, 1), (2, 0))] == COMPLETIONS
    assert [answer_seed("HumanEval/1", sample, seed) for sample, seed in ((0, 0), (1, 0), (0, 7))] == ANSWERS
    assert [round(number, 9) for number in token_numbers(7, 3)] == NUMBERS


def test_model_fingerprint_matches_record() -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        model.bias.copy_(torch.tensor([7.0, 8.0]))
    model.config = SimpleNamespace(model_type="tiny")  # type: ignore[assignment]
    assert model_fingerprint(model) == "2:tiny:b44b6969029fe592"
