"""The user's data in JSON or CSV: where it is converted to, what is used for validation, and what else is prepared."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from subprocess import run

import pyarrow
import pytest
from pyarrow import parquet

from tests.helpers import ROOT
from verl_ext.data.config import file_list
from verl_ext.data.prepare import is_prepared, prepare
from verl_ext.data.prepare.recipe_commands import run_commands
from verl_ext.errors import UserError
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.launch.configure import configure
from verl_ext.launch.preflight import needed_commands
from verl_ext.trainer.stages import RunConfig

CHATS = [{"prompt": f"p{index}", "response": "r"} for index in range(4)]
PROMPTS = [{"prompt": f"p{index}", "answer": index} for index in range(4)]


def write(path: Path, rows: list[dict[str, object]] = CHATS) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that relative paths are resolved against."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    return tmp_path / "repository"


def launched(*words: str, stage: str = "sft") -> RunConfig:
    return configure(parse_arguments([stage, "2", *words]))


def conversions(config: RunConfig) -> list[list[str]]:
    commands = [shlex.split(command) for command in config.prepare]
    return [words for words in commands if words[0] in ("chat", "prompts")]


@pytest.mark.parametrize(
    ("words", "validates"),
    [
        (["data.train_files={train}"], "split"),
        (["data.train_files={train}", "data.val_files={val}"], "converted"),
        (["data.train_files={train}", "data.val_files=null"], None),
        (["data.train_files={train}", "~data.val_files"], None),
        (["data.train_files={train}", "data.val_files=v.parquet"], "v.parquet"),
        (["data={{train_files: {train}, val_files: v.parquet}}"], "v.parquet"),
        (["data={{train_files: {train}}}"], "split"),
        (["recipe=verl", "data.train_files={train}"], "split"),
        (["recipe={recipe}"], "split"),
        (["recipe={recipe}", "data.val_files=v.parquet"], "v.parquet"),
        (["recipe={recipe_with_val}"], "v.parquet"),
        (["recipe={recipe_with_val}", "data.train_files={train}"], "split"),
        (["data.val_files={val}"], "converted"),
    ],
)
def test_validation_data_default_to_split_of_training_data(
    repository: Path, words: list[str], validates: str | None
) -> None:
    """Unless the command line or the recipe names validation data for the user's files."""
    train, val = write(repository / "mine.jsonl"), write(repository / "held out.jsonl")
    data = f"data:\n  train_files: {train}\n  multiturn: {{enable: true}}\n"
    (repository / "r.yaml").write_text(data)
    (repository / "w.yaml").write_text(f"{data}  val_files: v.parquet\n")
    paths = {
        "train": train,
        "val": f"'{val}'",
        "recipe": repository / "r.yaml",
        "recipe_with_val": repository / "w.yaml",
    }
    config = launched(*(word.format(**paths) for word in words))
    found = config.data.val_files
    if validates == "split":
        assert found == config.data.train_files.replace("train.parquet", "val.parquet")
    elif validates == "converted":
        assert found.startswith("data/held_out-") and found.endswith("/val.parquet")
    else:
        assert found == validates
    assert config.data.multiturn.enable and not (repository / "data").exists(), "nothing is written yet"


def test_files_are_converted_once_and_again_after_changes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(repository / "mine.jsonl")
    words = (f"data.train_files={path}", "model.partial_pretrain=elsewhere", "eval.recipe=humaneval")
    first = launched(*words)
    assert f"{path} is converted to {first.data.train_files}" in capsys.readouterr().out
    run_commands(needed_commands(first))
    assert "prompt/response" in capsys.readouterr().out
    assert Path(first.data.train_files).is_file() and Path(first.data.val_files).is_file()
    again = launched(*words)
    assert again == first
    assert f"{path} was already converted to {first.data.train_files}" in capsys.readouterr().out
    run_commands(needed_commands(again))
    assert "Preparing" not in capsys.readouterr().out
    write(path, CHATS[:3])
    assert launched(*words).data.train_files != first.data.train_files
    assert launched(*words, "data.val_files=null").data.train_files != first.data.train_files
    assert not Path("data/quickstart").exists()


def test_converted_file_is_reread_only_if_size_or_time_changed(repository: Path) -> None:
    def converted() -> str:
        """The configuration that another process prints."""
        words = [sys.executable, "-m", "verl_ext.launch", "sft", "--print-config", "data.train_files=mine.jsonl"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return run(words, env=environment, text=True, capture_output=True, check=True).stdout

    path = write(repository / "mine.jsonl")
    run_commands(needed_commands(launched("data.train_files=mine.jsonl")))
    first, before = converted(), path.stat()
    path.write_text(path.read_text().replace("p0", "q0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert converted() == first
    os.utime(path)
    assert converted() != first


def test_converts_several_files_with_custom_columns(repository: Path) -> None:
    write(repository / "a.jsonl", [{"ask": "a", "say": "r"}, {"ask": "b", "say": "r"}])
    (repository / "b.csv").write_text("ask,say\nc,r\n")
    config = launched("data.train_files=[a.jsonl,b.csv]", "data.prompt_key=ask", "data.response_key=say")
    [words] = conversions(config)
    prepare(words)
    assert json.loads(Path(config.data.train_files).with_name("prepared.json").read_text())["counts"]["read"] == 3


def test_parquet_next_to_json_is_used_directly_or_converted(repository: Path) -> None:
    """If the parquet file has question and answer columns, these differ from the columns of the converted file."""
    write(repository / "mine.jsonl")
    words = ("data.train_files=p.parquet", "data.val_files=mine.jsonl")
    assert launched(*words).data.train_files == "p.parquet"
    prepare(["chat", "--input", "mine.jsonl", "--output", ".", "--val-fraction", "0"])
    Path("train.parquet").rename("p.parquet")
    config = launched(*words, "data.multiturn.enable=false")
    assert config.data.train_files.startswith("data/p-") and len(conversions(config)) == 2
    with pytest.raises(UserError, match="data.prompt_dict_keys does not apply"):
        launched(*words, "data.multiturn.enable=false", "data.prompt_dict_keys=[a]")


TURNS = [[{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": "r"}] for index in range(3)]
SHAREGPT = [[{"from": "human", "value": f"q{index}"}, {"from": "gpt", "value": "r"}] for index in range(3)]
MAPS = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"conversations": SHAREGPT}, []),
        ({"conversations": SHAREGPT}, ["data.multiturn.messages_key=conversations"]),
        ({"messages": SHAREGPT}, []),
        ({"messages": [json.dumps(turns) for turns in TURNS]}, []),
        ({"messages": pyarrow.array([[list(turn.items()) for turn in turns] for turns in TURNS], MAPS)}, []),
        ({"instruction": ["q0", "q1", "q2"], "output": ["r"] * 3}, []),
        ({"ask": ["q0", "q1", "q2"], "say": ["r"] * 3}, ["data.prompt_key=ask", "data.response_key=say"]),
        ({"prompt": ["q0", "q1", "q2"], "chosen": ["r"] * 3, "rejected": ["s"] * 3}, ["data.response_key=chosen"]),
    ],
)
def test_converts_parquet_of_other_layouts(repository: Path, columns: dict[str, object], words: list[str]) -> None:
    parquet.write_table(pyarrow.table(columns), "mine.parquet")
    config = launched("data.train_files=mine.parquet", "data.val_files=null", *words)
    [command] = conversions(config)
    prepare(command)
    assert parquet.read_table(config.data.train_files).column("messages").to_pylist() == TURNS


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"messages": TURNS}, []),
        ({"talk": TURNS}, ["data.multiturn.messages_key=talk"]),
        ({"question": ["q0", "q1", "q2"], "answer": ["r"] * 3}, ["data.multiturn.enable=false"]),
    ],
)
@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_converts_parquet_with_system_column(
    repository: Path, name: str, columns: dict[str, object], words: list[str]
) -> None:
    """Training reads only the chats, so it would ignore the column."""
    parquet.write_table(pyarrow.table({**columns, name: ["s"] * 3}), "mine.parquet")
    config = launched("data.train_files=mine.parquet", "data.val_files=null", *words)
    [command] = conversions(config)
    prepare(command)
    system = {"role": "system", "content": "s"}
    assert parquet.read_table(config.data.train_files).column("messages").to_pylist() == [[system, *t] for t in TURNS]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"messages": TURNS, "system": [None] * 3}, []),
        ({"messages": TURNS, "prompt": ["p"] * 3, "response": ["r"] * 3}, []),
        ({"messages": [None, *TURNS[1:]]}, []),
        ({"talk": TURNS, "prompt": ["p"] * 3, "response": ["r"] * 3}, ["data.multiturn.messages_key=talk"]),
        ({"prompt": ["p"] * 3, "response": ["r"] * 3}, ["data.multiturn.enable=false"]),
        ({"conversations": SHAREGPT}, ["data.custom_cls.path=own.py", "data.custom_cls.name=Own"]),
        ({"text": ["t"] * 3}, []),
        ({"messages": [1, 2, 3]}, []),
    ],
)
def test_other_parquet_is_used_directly(repository: Path, columns: dict[str, object], words: list[str]) -> None:
    parquet.write_table(pyarrow.table(columns), "mine.parquet")
    config = launched("data.train_files=mine.parquet", "data.val_files=null", *words)
    assert config.data.train_files == "mine.parquet" and not conversions(config)


@pytest.mark.parametrize(("stage", "column"), [("sft", "messages"), ("grpo", "prompt")])
def test_parquet_is_not_validated_on_data_of_recipe(stage: str, column: str, repository: Path) -> None:
    parquet.write_table(pyarrow.table({column: TURNS}), "mine.parquet")
    mine = "data.train_files=mine.parquet"
    with pytest.raises(UserError, match=r"data.val_files=\S+, set by .*data.train_files=mine.parquet"):
        launched(mine, stage=stage)
    assert launched(mine, "data.val_files=mine.parquet", stage=stage).data.val_files == "mine.parquet"
    [val] = file_list(launched(stage=stage).data.val_files)
    part = Path(val).with_name("part.parquet")
    part.parent.mkdir(parents=True)
    part.write_bytes(Path("mine.parquet").read_bytes())
    for each in (part, part.absolute()):
        assert launched(f"data.train_files={each}", stage=stage).data.val_files == val


def test_converts_prompts_for_grpo(repository: Path) -> None:
    path = write(repository / "mine.jsonl", [{"ask": row["prompt"], "answer": row["answer"]} for row in PROMPTS])
    config = launched(f"data.train_files={path}", "data.prompt_key=ask", stage="grpo")
    [words] = conversions(config)
    assert words[0] == "prompts" and config.data.prompt_key == "prompt"
    prepare(words)
    assert is_prepared(words) and Path(config.data.val_files).is_file()


def test_converts_flat_parquet_for_grpo(repository: Path) -> None:
    """Otherwise a reward function would get no ground truth."""
    columns: dict[str, list[object]] = {"prompt": ["a", "b"], "answer": ["1", "2"]}
    flat, rl, prompts = (repository / f"{name}.parquet" for name in ("flat", "rl", "prompts"))
    parquet.write_table(pyarrow.table(columns), flat)
    parquet.write_table(pyarrow.table({**columns, "reward_model": [{"ground_truth": "1"}] * 2}), rl)
    parquet.write_table(pyarrow.table({"prompt": columns["prompt"]}), prompts)
    [words] = conversions(
        launched(f"data.train_files={flat}", "data.val_files=null", "data.eval_every_steps=0", stage="grpo")
    )
    assert words[:3] == ["prompts", "--input", str(flat)]
    for path in (rl, prompts):
        assert not conversions(
            launched(f"data.train_files={path}", "data.val_files=null", "data.eval_every_steps=0", stage="grpo")
        )


def test_converts_parquet_with_system_column_for_grpo(repository: Path) -> None:
    truths = [{"style": "rule", "ground_truth": "1"}] * 2
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "system": ["s"] * 2, "reward_model": truths}), "p.parquet")
    words = ("data.train_files=p.parquet", "data.val_files=null", "data.eval_every_steps=0")
    config = launched(*words, stage="grpo")
    [command] = conversions(config)
    prepare(command)
    rows = parquet.read_table(config.data.train_files).to_pylist()
    assert [[turn["content"] for turn in row["prompt"]] for row in rows] == [["s", "a"], ["s", "b"]]
    assert [row["reward_model"] for row in rows] == truths


def test_parquet_next_to_json_is_converted_for_grpo_if_its_prompts_have_another_column(repository: Path) -> None:
    truths = [{"style": "rule", "ground_truth": "1"}] * 2
    for name, column in {"ask.parquet": "ask", "usual.parquet": "prompt"}.items():
        parquet.write_table(pyarrow.table({column: ["a", "b"], "reward_model": truths}), name)
        write(repository / "val.jsonl", [{column: "c", "answer": 1}])
        words = (f"data.train_files={name}", "data.val_files=val.jsonl", f"data.prompt_key={column}")
        config = launched(*words, stage="grpo")
        for command in conversions(config):
            prepare(command)
        assert (config.data.train_files == name) == (column == "prompt") and config.data.prompt_key == "prompt"
        for path in (config.data.train_files, config.data.val_files):
            assert "prompt" in parquet.read_schema(path).names


def test_inputs_of_caller_directory_are_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = repository.parent
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(caller))
    (caller / "model").mkdir()
    for name in ("t.parquet", "both.parquet"):
        (caller / name).touch()
    Path("both.parquet").touch()
    words = ("data.train_files=[t.parquet,both.parquet]", "model.partial_pretrain=model", "data.val_files=no.parquet")
    config = launched(*words)
    assert config.data.train_files == [f"{caller}/t.parquet", "both.parquet"]
    assert (config.model.partial_pretrain, config.data.val_files) == (f"{caller}/model", "no.parquet")
    assert launched(*words, "model.partial_pretrain=org/model").model.partial_pretrain == "org/model"


def test_added_keys_without_effect_are_printed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched("+foo.bar=1", "+optim.lrr=3", "+optim.lr=1e-3")
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Keys added")]
    assert line.endswith(": foo.bar, optim.lrr (did you mean optim.lr?)")


def test_files_are_also_searched_in_caller_directory(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(repository.parent))
    path = write(repository.parent / "mine.jsonl")
    [words] = conversions(launched("data.train_files=mine.jsonl"))
    assert words[words.index("--input") + 1] == str(path)
    with pytest.raises(UserError, match=r"repository/nowhere\.json or .*/nowhere\.json"):
        launched("data.train_files=nowhere.json")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["recipe=smollm2_135m"], ["smollm2", "stdlib"]),
        (["recipe=smollm2_135m", "data.train_files=t.parquet", "data.val_files=null"], ["smollm2"]),
        (["recipe=smollm2_135m", "model.partial_pretrain=m"], ["stdlib"]),
        (["recipe=smollm2_135m", "data.train_files={train}"], ["chat", "smollm2"]),
        (["recipe=smollm2_135m", "data.train_files={train}", "model.partial_pretrain=m"], ["chat"]),
        (["recipe=gsm8k", "data.train_files={train}"], ["chat", "gsm8k"]),
        (["data.train_files={train}", "model.partial_pretrain=m"], ["chat", "quickstart"]),
        (["recipe=budget_vlm"], ["vqa"]),
    ],
)
def test_only_used_data_are_prepared(
    repository: Path, words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipes gsm8k and quickstart also prepare what their evaluation needs."""
    config = launched(*(word.format(train=write(repository / "mine.jsonl")) for word in words))
    needed = needed_commands(config)
    assert [command.split()[0] for command in needed] == names
    printed = capsys.readouterr().out
    assert all(command in printed for command in config.prepare if command not in needed)


def test_every_recipe_uses_all_it_prepares() -> None:
    for path in sorted((ROOT / "recipes").glob("[sg]*/*.yaml")):
        config = launched(f"recipe={path}", stage=path.parent.name)
        assert needed_commands(config) == list(config.prepare), path
