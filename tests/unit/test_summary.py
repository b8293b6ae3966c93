"""Commands end with a summary of one form, which names existing files and working commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verl_ext.console import print_next, print_summary, text_table, typed_path
from verl_ext.launch.configure import sft_command
from verl_ext.launch.report import next_after_evaluation, next_commands, print_run_summary
from verl_ext.trainer.config import GRPOModelConfig
from verl_ext.trainer.stages import RunConfig, load_config


def test_summary_has_result_facts_and_next_commands(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("Done: it", {"short": 1, "left out": None, "a name that is longer": "x"}, ["ls", "a b"], table="1\n2")
    assert capsys.readouterr().out == (
        "Done: it\n  1\n  2\n  short                 1\n  a name that is longer x\nNext: ls 'a b'\n"
    )
    print_summary("Done: it")
    assert capsys.readouterr().out == "Done: it\n"
    print_next([["ls"], [], ["cat", "b"]])
    assert capsys.readouterr().out == "Next: ls\n      cat b\n"


def test_text_table_aligns_columns_without_trailing_space() -> None:
    assert text_table([["a", "long", "c"], ["wide", "b", ""]]) == "a     long  c\nwide  b"
    with pytest.raises(ValueError, match="shorter"):
        text_table([["a", "b"], ["a"]])


def test_typed_path_is_relative_to_caller_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(ROOT))
    assert typed_path(ROOT / "checkpoints/a/b") == "checkpoints/a/b"
    assert typed_path(tmp_path) == str(tmp_path)
    assert typed_path("-dash/a") == "./-dash/a"
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path))
    assert typed_path(ROOT / "run_sft.sh") == str(ROOT / "run_sft.sh")


@pytest.fixture
def caller_in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(ROOT))
    monkeypatch.chdir(ROOT)


def shown(commands: list[list[str]]) -> list[str]:
    return [shlex.join(words) for words in commands if words]


def finished(*words: str, command: str = "sft", ranks: int = 2) -> RunConfig:
    config = load_config(command, list(words))
    config.trainer.n_gpus_per_node = ranks
    return config


RUN = "checkpoints/rlvr_coding_model"


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ([], [f"watch {RUN}/sft_quickstart", "bash run_grpo.sh 2"]),
        (
            ["trainer.experiment_name=low"],
            [f"watch {RUN}/low", f"bash run_grpo.sh 2 model.sft_run={RUN}/low"],
        ),
        (
            ["recipe=qwen2.5_coder_7b"],
            [f"watch {RUN}/phase1_sft_qwen7b_coder", "bash run_grpo.sh 2 recipe=qwen2.5_coder_7b_code"],
        ),
        (["recipe=verl"], []),  # which names no evaluation
        (["recipe=verl", "eval.recipe=mine.yaml"], ["watch checkpoints/gsm8k-sft/test --recipe mine.yaml"]),
        (["recipe=budget_vlm"], ["bash run_grpo.sh 2 recipe=budget_controller"]),
        (
            ["recipe=budget_vlm", "trainer.experiment_name=low"],
            [f"bash run_grpo.sh 2 recipe=budget_controller model.sft_run={RUN}/low"],
        ),
    ],
)
@pytest.mark.usefixtures("caller_in_repository")
def test_next_commands_are_evaluation_and_following_stage(words: list[str], commands: list[str]) -> None:
    commands = [f"bash eval_pipeline/run.sh {text}" if text.startswith("watch") else text for text in commands]
    assert shown(next_commands(finished(*words))) == commands


@pytest.mark.parametrize("name", ["it's", 'a"b', "[a]", "{a}", "{a", "a,b", "a b", "-dash", "null", "1e5", "é#"])
@pytest.mark.usefixtures("caller_in_repository")
def test_next_commands_can_be_typed(name: str) -> None:
    config = finished()
    config.trainer.default_local_dir = name
    *_, override = shlex.split(shown(next_commands(config))[1])
    model = load_config("grpo", [override]).model
    assert isinstance(model, GRPOModelConfig) and Path(str(model.sft_run)) == Path(name)
    command = sft_command(Path(name, "rlvr_coding_model", "sft_quickstart"), 2)
    assert command is not None
    *_, override = shlex.split(command)
    assert load_config("sft", [override]).trainer.run_dir.parts[0] == name


@pytest.mark.usefixtures("caller_in_repository")
def test_run_evaluated_while_training_suggests_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = finished("eval.watch=true", f"model.partial_pretrain={tmp_path}")
    [report, grpo] = shown(next_after_evaluation(config))
    assert report == f"bash eval_pipeline/run.sh report {RUN}/sft_quickstart --baseline {tmp_path}"
    assert grpo == "bash run_grpo.sh 2"
    config.model.partial_pretrain = "a-hub/model"  # which a report cannot take
    assert shown(next_after_evaluation(config))[0].startswith("bash eval_pipeline/run.sh status ")


def rows_of(output: str) -> dict[str, str]:
    """The rows of a summary by name."""
    return {line[2:17].strip(): line[18:] for line in output.splitlines() if line.startswith("  ")}


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run whose directory has a checkpoint of step 5, and one of step 30 from an earlier run."""
    for step in (5, 30):
        (tmp_path / f"global_step_{step}/huggingface").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    return finished(f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=mine")


def test_summary_of_run_ignores_overtaken_attempts(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(1, 1, "train", 4.0), (2, 1, "train", 3.0), (3, 1, "train", 99.0), (3, 2, "train", 2.0)]
    rows += [(3, 3, "val", 5.0)]  # a validation that a stop had interrupted
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "attempt": a, "time": 0.0, f"{k}/loss": x}) + "\n" for s, a, k, x in rows)
    )
    (tmp_path / "training_history.csv").touch()
    print_run_summary(run)
    output = capsys.readouterr().out
    assert output.startswith("Finished: mine (sft)\n")
    shown_rows = rows_of(output)
    assert shown_rows["train/loss"] == "4.0000 at step 1 -> 2.0000 at step 3"
    # of what a run can write only what this one has
    assert shown_rows["run directory"] == f"{tmp_path}  (metrics.jsonl, *_history.csv)"
    assert shown_rows["last checkpoint"] == f"{tmp_path}/global_step_5"  # the tracker's, not the highest


def test_summary_of_run_without_export_says_how_to_export(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = f"-m verl_ext.checkpoint export {tmp_path}/global_step_5"
    print_run_summary(run)
    output = capsys.readouterr().out
    assert "no weights" in rows_of(output)["Hugging Face"] and "hf_model" not in output
    assert output.splitlines()[-1].startswith("Next: ") and output.splitlines()[-1].endswith(export)
    run.trainer.checkpoint.save_contents = ["model"]
    print_run_summary(run)
    output = capsys.readouterr().out
    assert "save_contents lacks hf_model" in rows_of(output)["Hugging Face"] and output.endswith(f"{export}\n")


@pytest.mark.usefixtures("caller_in_repository")
def test_summary_shows_export_and_next_commands_unless_watching(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "global_step_5/huggingface/model.safetensors").touch()
    print_run_summary(run)
    output = capsys.readouterr().out
    assert rows_of(output)["Hugging Face"] == f"{tmp_path}/global_step_5/huggingface"
    assert f"\nNext: bash eval_pipeline/run.sh watch {tmp_path}\n" in output
    run.eval.watch = True
    print_run_summary(run)
    assert "Next:" not in capsys.readouterr().out
