"""What commands say at their end has one form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext.launch.summary import next_command, print_summary
from verl_ext.summary import tell_summary, text_table


def test_a_summary_is_what_was_done_then_facts_then_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    tell_summary("Done: it", {"short": 1, "left out": None, "a name that is longer": "x"}, ["ls", "a b"], table="1\n2")
    assert capsys.readouterr().out == (
        "Done: it\n  1\n  2\n  short                 1\n  a name that is longer x\nNext: ls 'a b'\n"
    )
    tell_summary("Done: it")
    assert capsys.readouterr().out == "Done: it\n"


def test_cells_of_a_table_stand_below_each_other_and_lines_end_with_a_letter() -> None:
    assert text_table([["a", "long", "c"], ["wide", "b", ""]]) == "a     long  c\nwide  b"
    with pytest.raises(ValueError, match="shorter"):
        text_table([["a", "b"], ["a"]])


@pytest.mark.parametrize(
    ("watch", "model", "words"),
    [
        (False, "model", ["watch", "run"]),
        (True, "model", ["report", "run", "--baseline", "{model}"]),
        (True, "a-hub/model", ["watch", "run"]),
    ],
)
def test_where_checkpoints_are_evaluated_beside_the_training_a_comparison_comes_next(
    tmp_path: Path, watch: bool, model: str, words: list[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    began = str(tmp_path / "model") if model == "model" else model
    config = {"stage": "sft", "model": {"partial_pretrain": began}, "eval": {"watch": watch, "recipe": "mine.yaml"}}
    told = next_command(OmegaConf.create(config), Path("run"), Path("run/export"))
    assert told[1:] == ["-m", "eval_pipeline", *(word.format(model=began) for word in words), "--recipe", "mine.yaml"]


def test_a_finished_run_tells_what_was_learnt_without_what_an_attempt_overtook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(1, 1, 4.0), (2, 1, 3.0), (3, 1, 99.0), (3, 2, 2.0)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "attempt": a, "time": 0.0, "train/loss": loss}) + "\n" for s, a, loss in rows)
    )
    trainer = {"default_local_dir": str(tmp_path), "experiment_name": "mine"}
    print_summary(OmegaConf.create({"trainer": trainer, "stage": "sft"}))
    first, loss, place = capsys.readouterr().out.splitlines()
    assert first == "Finished: mine (sft)"
    assert loss == "  train/loss      4.0000 at step 1 -> 2.0000 at step 3"
    assert place.startswith(f"  run directory   {tmp_path}  (metrics.jsonl")


def test_the_last_checkpoint_is_that_of_the_tracker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what a former run of the same directory has left, or somebody else."""
    for step in (5, 30):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    trainer = {"default_local_dir": str(tmp_path), "experiment_name": "mine"}
    print_summary(OmegaConf.create({"trainer": trainer, "stage": "sft"}))
    assert f"last checkpoint {tmp_path}/global_step_5\n" in capsys.readouterr().out
