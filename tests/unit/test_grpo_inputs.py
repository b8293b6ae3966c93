"""Prompts, recipes and settings of the GRPO stage, and how invalid ones are rejected."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.problem import DatasetSource
from eval_pipeline.problems.verl_rl import read_tests
from tests.helpers import ROOT
from tests.helpers.models import cache_as_hub
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.config.compose import load_yaml
from verl_ext.config.recipes import RECIPES
from verl_ext.data.dataset import iter_parquet_rows
from verl_ext.data.prepare import prepare
from verl_ext.data.prompts import PromptBatch, PromptDataset
from verl_ext.errors import UserError
from verl_ext.launch.configure import resolve_model
from verl_ext.launch.preflight import check_config, check_inputs
from verl_ext.launch.run import lease_inputs
from verl_ext.trainer.model import load_model_config
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, load_config, sft_recipe_of
from verl_ext.trainer.tokenizer import load_tokenizer

GSM8K = {"question": "What is 40 + 2?", "answer": "It is <<40+2=42>>42.\n#### 42"}


@pytest.fixture(scope="module")
def tokenizer(quickstart: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the quickstart model."""
    return AutoTokenizer.from_pretrained(quickstart / "model")


def config_with(quickstart: Path, tmp_path: Path, *overrides: str) -> GRPOConfig:
    """The quickstart recipe on the small data of the test session."""
    config = load_config(
        "grpo",
        [
            *("prepare=[]", f"trainer.default_local_dir={tmp_path / 'run'}", "data.train_batch_size=8"),
            *(f"data.train_files={quickstart}/prompts.parquet", f"data.val_files={quickstart}/val_prompts.parquet"),
            *(f"model.partial_pretrain={quickstart}/model", "actor.ppo_mini_batch_size=4"),
            *("trainer.n_gpus_per_node=2", *overrides),
        ],
    )
    assert isinstance(config, GRPOConfig)
    return config


def test_valid_settings_are_accepted(quickstart: Path, tmp_path: Path) -> None:
    config = config_with(quickstart, tmp_path)
    check_config(config)
    check_inputs(config)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.n=1", "must be an integer of at least 2"),
        ("actor.ppo_mini_batch_size=3", "data.train_batch_size=8 .*set actor.ppo_mini_batch_size=4"),
        ("data.train_batch_size=7", "set data.train_batch_size=8"),
        ("reward.functions=[code_test]", "did you mean code_tests"),
        ("reward.functions=[]", "is empty"),
        ("reward.functions=[nothing.py:f]", "does not exist"),
        (f"reward.functions=[{__file__}:f]", "has no 'f'; it has"),
        ("reward.functions=[nothing.at_all:f]", "'nothing.at_all', which is not found"),
        ("reward.functions=[json:lods]", "json has no 'lods'; it has .*loads"),
        ("reward.packages=[numpyy]", "reward.packages names 'numpyy', which is not installed"),
        ("model.fsdp_config.keep_gathered=sometimes", "must be auto, true or false"),
        ("rollout.engine=sglang", "must be vllm or hf"),
        ("rollout.temperature=0", "must be a number from 0.001 to 100"),
        ("actor.kl_loss_coef=inf", "must be a finite number of at least 0"),
        ("actor.loss_agg_mode=mean", "must be token-mean"),
        ("actor.kl_loss_type=k9", "must be kl, k1"),
        ("algorithm.rollout_correction.rollout_is=group", "must be token or sequence, or null"),
        ("data.eval_split=dev", "must be test or train"),
        ("data.max_response_length=100000", "more than the model's context"),
        ("data.prompt_key=question", "no column 'question'"),
        ("ulysses_sequence_parallel_size=2", "ulysses"),
        ("rollout.tensor_model_parallel_size=3", "does not divide the 2 ranks"),
        ("data.truncation=left", "the command line sets data.truncation, which has no effect in the stage grpo"),
        ("trainer.test_freq=3", "trainer.test_freq=3 differs from data.eval_every_steps=.*omit trainer.test_freq"),
        ("data.eval_every_steps=99999999999", "at most 2147483647, or 0 for never"),
        ("data.val_files=null", "data.val_files is not set"),
        ("data.val_files=[]", "data.val_files is not set"),
    ],
)
def test_invalid_settings_are_rejected(quickstart: Path, tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config = config_with(quickstart, tmp_path, override)
        check_config(config)
        check_inputs(config)


@pytest.mark.parametrize("first", ["42", '{"entry_point": "f", "tests": ["assert f()"]}'])
def test_tests_are_required_in_every_row(quickstart: Path, tmp_path: Path, first: str) -> None:
    truths = sorted(["42", '{"entry_point": "f", "tests": ["assert f()"]}'], key=lambda truth: truth != first)
    rows = [{"prompt": f"q{number}", "reward_model": {"ground_truth": truths[number % 2]}} for number in range(8)]
    path = tmp_path / "mixed.parquet"
    pd.DataFrame(rows).to_parquet(path)
    data = f"data.train_files={path}"
    where = truths.index("42")
    with pytest.raises(UserError, match=f"reward code_tests runs tests, but .* row {where} is '42', which has none"):
        check_inputs(config_with(quickstart, tmp_path, data, "reward.functions=[code_tests]"))
    check_inputs(config_with(quickstart, tmp_path, data, "reward.functions=[reward_correct]"))


def test_tests_that_never_run_are_rejected(quickstart: Path, tmp_path: Path) -> None:
    truths = [json.dumps({"entry_point": "f", "tests": [test]}) for test in ("f(1)", "def test_f():\n    assert f(1)")]
    path = tmp_path / "idle.parquet"
    pd.DataFrame([{"prompt": "q", "reward_model": {"ground_truth": truth}} for truth in truths * 4]).to_parquet(path)
    settings = (f"data.train_files={path}", "reward.functions=[code_tests]")
    with pytest.raises(UserError, match=r"tests\[0\] of .*idle.parquet row 1 defines test_f but never calls it"):
        check_inputs(config_with(quickstart, tmp_path, *settings))


def test_tests_with_outputs_beyond_limit_are_rejected(quickstart: Path, tmp_path: Path) -> None:
    truths = [json.dumps({"inputs": [""], "outputs": ["1" * size]}) for size in (*[1] * 7, 4 << 20, (4 << 20) + 1)]
    path = tmp_path / "long.parquet"
    pd.DataFrame([{"prompt": "q", "reward_model": {"ground_truth": truth}} for truth in truths]).to_parquet(path)
    settings = (f"data.train_files={path}", f"data.val_files={path}", "reward.functions=[code_tests]")
    with pytest.raises(UserError, match=r"output 0 of .*long.parquet row 8 has 4,194,305 bytes.*; drop the row"):
        check_inputs(config_with(quickstart, tmp_path, *settings))


def test_latex_damaged_by_json_is_rejected(quickstart: Path, tmp_path: Path) -> None:
    truths = [r"\frac{1}{2}", json.loads('"\\frac{1}{2}"')]
    path = tmp_path / "latex.parquet"
    pd.DataFrame([{"prompt": "q", "reward_model": {"ground_truth": truth}} for truth in truths * 4]).to_parquet(path)
    settings = (f"data.train_files={path}", "reward.functions=[reward_correct]")
    with pytest.raises(UserError, match=r"row 1, '\\x0crac.*, has a control character .* write \\\\frac in JSON"):
        check_inputs(config_with(quickstart, tmp_path, *settings))


@pytest.mark.parametrize("measures", ["data.eval_split=train", "data.eval_every_steps=0"])
def test_validation_file_is_needed_only_for_validation(quickstart: Path, tmp_path: Path, measures: str) -> None:
    config = config_with(quickstart, tmp_path, "data.val_files=null", measures)
    check_config(config)
    check_inputs(config)


def write_checkpoint(path: Path, *files: str) -> Path:
    """A complete checkpoint with these files; the default is the files of an export."""
    files = files or ("huggingface/config.json", "huggingface/model.safetensors")
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    sizes = {name: {"bytes": 2} for name in files}
    (path / "manifest.json").write_text(Manifest(int(path.name.rpartition("_")[2]), 2, "", sizes).to_json())
    return path


def settled(quickstart: Path, tmp_path: Path, *overrides: str) -> GRPOConfig:
    """The quickstart recipe after an SFT run in `tmp_path / "sft"`."""
    sft_run = ("model.partial_pretrain=null", f"model.sft_run={tmp_path / 'sft'}")
    config = config_with(quickstart, tmp_path, *sft_run, *overrides)
    resolve_model(config)
    return config


def test_initial_model_is_best_or_else_newest_checkpoint(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft_run = tmp_path / "sft"
    for step in (10, 20):
        write_checkpoint(sft_run / f"global_step_{step}")
    write_checkpoint(sft_run / "global_step_30", "huggingface/config.json")  # without weights
    config = settled(quickstart, tmp_path)
    assert config.model.partial_pretrain == str(sft_run / "global_step_20" / "huggingface")
    [line] = capsys.readouterr().out.splitlines()
    assert "global_step_20" in line and f"watch {sft_run}`" in line
    settled(quickstart, tmp_path, f"trainer.resume_from_path={tmp_path}/other/global_step_4")
    assert capsys.readouterr().out == "", "the run starts from the other checkpoint"
    (sft_run / "best_checkpoint.json").write_text(json.dumps({"checkpoint": "global_step_10"}))
    config = settled(quickstart, tmp_path)
    assert config.model.partial_pretrain == str(sft_run / "global_step_10" / "huggingface")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_deferred", [True, False])
def test_sft_run_with_deferred_or_damaged_export_names_command(
    is_deferred: bool, quickstart: Path, tmp_path: Path
) -> None:
    """An older checkpoint would be used silently otherwise."""
    write_checkpoint(tmp_path / "sft/global_step_10")
    newest = write_checkpoint(tmp_path / "sft/global_step_20", *(["huggingface/config.json"] if is_deferred else []))
    if is_deferred:
        manifest = replace(Manifest.read(newest), deferred=("huggingface",))
        (newest / "manifest.json").write_text(manifest.to_json())
    else:
        (newest / "huggingface/model.safetensors").unlink()
    with pytest.raises(UserError, match=f"checkpoint export {newest}`, or finish the run"):
        settled(quickstart, tmp_path)


def test_resumed_run_keeps_its_initial_model(quickstart: Path, tmp_path: Path) -> None:
    """This holds for any spelling of the SFT run's path. The checkpoint is held; a missing one is reported."""
    sft_run, run_dir = tmp_path / "sft", tmp_path / "run"
    for step in (10, 20):
        write_checkpoint(sft_run / f"global_step_{step}")
    begun = f"{sft_run}/global_step_10/huggingface"
    former = {"model": {"sft_run": f"{tmp_path}/other/../sft", "partial_pretrain": begun}}
    for directory in (tmp_path / "other", run_dir):
        directory.mkdir()
    (run_dir / "config.yaml").write_text(json.dumps(former))  # which is YAML too
    assert str(settled(quickstart, tmp_path).model.partial_pretrain).endswith("global_step_20/huggingface")
    write_checkpoint(run_dir / "global_step_5")
    kept = settled(quickstart, tmp_path)
    assert kept.model.partial_pretrain == begun
    (sft_run / "best_checkpoint.json").write_text(json.dumps({"checkpoint": "global_step_20"}))
    assert settled(quickstart, tmp_path).model.partial_pretrain == begun
    restarted = settled(quickstart, tmp_path, "trainer.resume_mode=disable")
    assert str(restarted.model.partial_pretrain).endswith("global_step_20/huggingface")
    with lease_inputs(kept):
        assert lease_holders(sft_run / "global_step_10") and not lease_holders(sft_run / "global_step_20")
    assert not lease_holders(sft_run / "global_step_10")
    shutil.rmtree(sft_run / "global_step_10")
    with pytest.raises(UserError, match="which no longer exists"):
        settled(quickstart, tmp_path)


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen2.5-1.5B-Instruct", "~/model"])
def test_restart_keeps_hub_model_and_home_directory_model(
    model: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(quickstart / "model")
    write_checkpoint(tmp_path / "run/global_step_5")
    former = {"model": {"sft_run": f"{tmp_path}/sft", "partial_pretrain": model}}
    (tmp_path / "run/config.yaml").write_text(json.dumps(former))
    assert settled(quickstart, tmp_path).model.partial_pretrain == model
    (tmp_path / "model").unlink()
    if model.startswith("~"):
        with pytest.raises(UserError, match="which no longer exists"):
            settled(quickstart, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "owner/name"])
def test_ranks_load_hub_model_from_cache(
    name: str, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_as_hub(quickstart / "model", name, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    config = config_with(quickstart, tmp_path, f"model.partial_pretrain={name}")
    check_config(config)
    check_inputs(config)
    assert load_model_config(config).model_type == "qwen2" and load_tokenizer(config).chat_template


@pytest.mark.parametrize("content", ["{", "[]", '{"checkpoint": 5}', '{"checkpoint": "../other/global_step_5"}'])
def test_damaged_best_record_is_rejected_despite_export(content: str, quickstart: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "sft" / "global_step_5")
    (tmp_path / "sft" / "best_checkpoint.json").write_text(content)
    with pytest.raises(UserError, match="best_checkpoint.json .*delete it.*model.partial_pretrain="):
        settled(quickstart, tmp_path)


def test_missing_export_error_has_export_command(quickstart: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "sft" / "global_step_5", "huggingface/config.json")
    with pytest.raises(UserError, match=f"verl_ext.checkpoint export {checkpoint}`"):
        settled(quickstart, tmp_path)
    (tmp_path / "sft" / "best_checkpoint.json").write_text('{"checkpoint": "global_step_5"}')
    with pytest.raises(UserError, match=f"verl_ext.checkpoint export {checkpoint}`"):
        settled(quickstart, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("quickstart", ""),
        ("gsm8k", " recipe=gsm8k"),
        ("smollm2_gsm8k", " recipe=smollm2_135m"),
        ("qwen2.5_coder_7b_code", " recipe=qwen2.5_coder_7b"),
        ("budget_controller", " recipe=budget_vlm"),
    ],
)
def test_missing_sft_run_error_has_its_command(
    recipe: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no run is here
    config = load_config("grpo", [f"recipe={recipe}"])
    assert isinstance(config, GRPOConfig | BudgetConfig)
    config.trainer.n_gpus_per_node = 4
    with pytest.raises(UserError, match=f"`bash run_sft.sh 4{re.escape(words)}`"):
        resolve_model(config)
    Path(config.model.sft_run).mkdir(parents=True)  # started, but nothing saved
    with pytest.raises(UserError, match=f"`bash run_sft.sh 4{re.escape(words)}`"):
        resolve_model(config)
    config.model.sft_run = f"{tmp_path}/elsewhere/{config.model.sft_run.removeprefix('checkpoints/')}"
    with pytest.raises(UserError, match=f"run_sft.sh 4{re.escape(words)} trainer.default_local_dir={tmp_path}/else"):
        resolve_model(config)


def test_shipped_recipes_build_on_shipped_sft_recipes() -> None:
    recipes = (RECIPES / "grpo").glob("*.yaml")
    run_dirs = {path.stem: load_yaml(path).get("model", {}).get("sft_run") for path in recipes}
    found = {name: sft_recipe_of(Path(run_dir)) for name, run_dir in run_dirs.items() if run_dir is not None}
    assert found and None not in found.values(), found


def test_missing_run_of_unknown_recipe_is_reported(quickstart: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sft does not exist; specify the run directory of an SFT run"):
        settled(quickstart, tmp_path)


def test_missing_model_settings_are_rejected(quickstart: Path, tmp_path: Path) -> None:
    config = config_with(quickstart, tmp_path, "model.partial_pretrain=null", "model.sft_run=null")
    with pytest.raises(UserError, match="model.sft_run=RUN_DIRECTORY"):
        resolve_model(config)


def test_quickstart_prompts_are_disjoint_from_held_out(
    quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Prompts have tests, and no prompt is a held-out problem."""
    config = config_with(quickstart, tmp_path).data
    train, val = (PromptDataset(getattr(config, name), tokenizer, config) for name in ("train_files", "val_files"))
    held_out = {json.loads(line)["problem_id"] for line in (quickstart / "problems.jsonl").open()}
    ids = [{item["sample_id"] for item in (dataset[n] for n in range(len(dataset)))} for dataset in (train, val)]
    assert len(train) == len(ids[0]) == 1800 and len(val) == len(ids[1]) == 120
    assert not ids[0] & ids[1] and not (ids[0] | ids[1]) & held_out
    item = train[7]
    assert tokenizer.decode(item["prompt_ids"]) == item["prompt_text"] and "Write " in item["prompt_text"]
    assert item["row"] == 7 and PromptBatch([item]).rows == [7]
    tests = read_tests(item["reward_model"]["ground_truth"], item["sample_id"])
    assert tests.entry_point in item["prompt_text"]  # type: ignore[union-attr]


def test_gsm8k_prompts_match_verl_format(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, quickstart: Path) -> None:
    """The rows equal those of verl's preparation, with the instruction for the tags."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(GSM8K) + "\n")
    output = tmp_path / "out"
    prepare(["gsm8k", "--source", str(tmp_path), "--style", "think", "--task", "rl", "--output", str(output)])
    row = pd.read_parquet(output / "train.parquet").iloc[0]
    assert row.data_source == "openai/gsm8k" and row.reward_model["ground_truth"] == "42"
    assert [turn["role"] for turn in row.prompt] == ["user"] and "<think>" in row.prompt[0]["content"]
    dataset = PromptDataset(str(output / "train.parquet"), tokenizer, config_with(quickstart, tmp_path).data)
    assert dataset[0]["sample_id"] == "gsm8k/train/0" and dataset.describe([0]) == "gsm8k/train/0"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([{"role": "user", "content": "word " * 300}], "max_prompt_length"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "last turn"),
        ([], "not a list of turns"),
        (None, "is null; drop the row, or convert .*prepare prompts"),
        ("[{'role': 'user', 'content': 'a'}]", "turns as text that is not JSON"),
    ],
)
def test_invalid_prompts_are_rejected_with_row(
    prompt: Any, says: str, quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.parquet"
    fine: Any = [{"role": "user", "content": "fine"}]
    pd.DataFrame({"prompt": ["fine" if isinstance(prompt, str) else fine, prompt]}).to_parquet(path)
    with pytest.raises(UserError, match=f"prompts.parquet row 1 .*{says}"):
        PromptDataset(str(path), tokenizer, config_with(quickstart, tmp_path).data)


def test_turns_as_json_text_are_decoded(quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    data, path = config_with(quickstart, tmp_path).data, tmp_path / "prompts.parquet"
    pd.DataFrame({"prompt": [turns]}).to_parquet(path)
    expected = PromptDataset(str(path), tokenizer, data)[0]["prompt_text"]
    pd.DataFrame({"prompt": [json.dumps(turns, indent=1)]}).to_parquet(path)
    assert PromptDataset(str(path), tokenizer, data)[0]["prompt_text"] == expected


CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
USER, SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "Be brief."}
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
# like Mistral's
LAST_TURN_WITH_SYSTEM = (
    "{% for m in messages[1:] %}{% if m.role == 'user' and loop.last %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, USER]}, None, "tool_calls"),
        ({"prompt": [USER, {"role": "assistant", "content": "b", "reasoning_content": "c"}, USER]}, None, "reasoning"),
        ({"prompt": [SYSTEM, USER]}, None, None),
        ({"prompt": [SYSTEM, USER]}, LAST_TURN_WITH_SYSTEM, None),
        ({"prompt": [SYSTEM, USER]}, NO_SYSTEM, "omits the text of turn 0, whose role is system"),
        ({"prompt": [{**USER, "role": "User"}]}, None, "turn 0 has the role 'User'"),
        ({"prompt": [USER], "tools": CALLS}, None, "it has tools"),
        ({"prompt": [USER], "tools": "[]"}, None, None),
    ],
)
def test_prompts_that_would_lose_text_are_rejected(
    row: dict[str, Any], template: str | None, says: str | None, quickstart: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = template or tokenizer.chat_template
    path = tmp_path / "prompts.parquet"
    pd.DataFrame([row]).to_parquet(path)
    with pytest.raises(UserError, match=f"row 0 cannot be used: .*{says}") if says else nullcontext():
        PromptDataset(str(path), tokenizer, config_with(quickstart, tmp_path).data)


@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
def test_text_in_mapping_column_is_rejected(
    column: str, quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.parquet"
    pd.DataFrame({"prompt": ["What is 6 * 12?"], column: ['{"ground_truth": "72"}']}).to_parquet(path)
    with pytest.raises(UserError, match=f"prompts.parquet row 0 .*'{column}' has type str"):
        PromptDataset(str(path), tokenizer, config_with(quickstart, tmp_path).data)


def test_null_members_of_extra_info_are_kept(
    quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Functions written for verl read them; nested ones belong to other rows."""
    extra = [{"hint": None, "meta": {"a": 1}}, {"hint": "think", "meta": {"b": 2}}]
    pd.DataFrame({"prompt": ["q"] * 2, "extra_info": extra}).to_parquet(tmp_path / "prompts.parquet")
    found = PromptDataset(str(tmp_path / "prompts.parquet"), tokenizer, config_with(quickstart, tmp_path).data)
    assert [found[row]["extra_info"] for row in range(2)] == extra


def test_chat_template_uses_given_date(quickstart: Path, tmp_path: Path) -> None:
    """The date replaces the clock in the template's `strftime_now`."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    pd.DataFrame({"prompt": ["What day is it?"]}).to_parquet(tmp_path / "prompts.parquet")
    data = config_with(quickstart, tmp_path).data

    def prompt(now: datetime | None) -> str:
        return PromptDataset(str(tmp_path / "prompts.parquet"), tokenizer, data, now=now)[0]["prompt_text"]

    assert prompt(datetime(2020, 7, 4, 9, 30)) == "04 Jul 2020: What day is it?"
    assert datetime.strptime(prompt(None).partition(":")[0], "%d %b %Y") >= datetime(2026, 1, 1)


def test_text_parts_of_prompt_are_joined(quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "f."}]
    for name, content in {"parts": parts, "text": "Write f."}.items():
        pd.DataFrame({"prompt": [[{"role": "user", "content": content}]]}).to_parquet(tmp_path / f"{name}.parquet")
    data = config_with(quickstart, tmp_path).data
    joined, text = (PromptDataset(str(tmp_path / f"{name}.parquet"), tokenizer, data) for name in ("parts", "text"))
    assert joined[0]["prompt_ids"] == text[0]["prompt_ids"]


def test_too_long_prompts_are_dropped_and_ids_made_unique(
    quickstart: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Too long prompts are dropped on request. Ids are made unique because seeds derive from them."""
    frame = pd.read_parquet(quickstart / "val_prompts.parquet").head(4)
    frame.at[1, "prompt"] = [{"role": "user", "content": "long " * 500}]
    frame["extra_info"] = [*[{"problem_id": "same"}] * 3, {"problem_id": "same#2"}]
    frame.to_parquet(tmp_path / "prompts.parquet")
    files = [f"{tmp_path}/prompts.parquet"] * 2
    with pytest.raises(UserError, match="filter_overlong_prompts=true"):
        PromptDataset(files, tokenizer, config_with(quickstart, tmp_path).data)
    data = config_with(quickstart, tmp_path, "data.filter_overlong_prompts=true").data
    found = PromptDataset(files, tokenizer, data)
    names = ["same", "same#2", "same#2#2", "same#3", "same#4", "same#2#3"]
    assert [found[n]["sample_id"] for n in range(len(found))] == names
    assert [found[n]["row"] for n in range(6)] == [*range(6)]
    data.max_prompt_length = 1
    with pytest.raises(UserError, match="no prompt of"):
        PromptDataset(files, tokenizer, data)


def test_prompts_of_problems_keep_earlier_turns(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": turns, "reward_model": {"ground_truth": "2"}}))
    prepare(["problems", "--format", "verl", "--source", str(tmp_path / "in.jsonl"), "--output", str(tmp_path)])
    [row] = iter_parquet_rows(tmp_path / "prompts.parquet")
    assert row["prompt"] == turns


def test_math_problems_become_prompts_for_reward_correct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"problem": "Expand.", "solution": r"It is \boxed{x^2}."}
    (tmp_path / "in.jsonl").write_text(json.dumps(problem))
    words = ["problems", "--format", "math", "--source", str(tmp_path / "in.jsonl"), "--output", str(tmp_path)]
    prepare(words, is_typed=True)
    [row] = iter_parquet_rows(tmp_path / "prompts.parquet")
    assert row["reward_model"]["ground_truth"] == "x^2" and row["extra_info"]["problem_id"] == "math/1"
    assert "'reward.functions=[reward_correct]'" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", ["mbpp", "codecontests"])
def test_problems_are_converted_to_prompts(name: str, tmp_path: Path) -> None:
    """Training uses the prompts and tests of the evaluation, limited to the first tests."""
    source = ROOT / "tests" / "assets" / f"{name}_small.jsonl"
    prepare(["problems", "--format", name, "--source", str(source), "--max-tests", "2", "--output", str(tmp_path)])
    expected = load_problems(DatasetSource(name, name, str(source)))
    found = load_problems(DatasetSource(name, "verl", str(tmp_path / "prompts.parquet")))
    assert [(p.problem_id, p.prompt) for p in found] == [(p.problem_id, p.prompt) for p in expected]
    for ours, theirs in zip(found, expected):
        field = "tests" if hasattr(theirs.tests, "tests") else "cases"
        assert ours.tests == replace(theirs.tests, **{field: getattr(theirs.tests, field)[:2]})
