"""Checkpoints, their exports, run settings and output directories: what is read and what is rejected."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from eval_pipeline.checkpoints import (
    CheckpointScanner,
    EvalCheckpoint,
    EvalDir,
    TrainingRun,
    base_model,
    eval_dir_of_checkpoint,
    eval_dir_of_run,
    find_checkpoint,
    find_eval_dir,
    lease_checkpoint,
    read_training_run,
    served_checkpoint,
)
from eval_pipeline.engines import ServedModel
from eval_pipeline.jobs import LEDGER_FILE
from eval_pipeline.recipe import EvalDigests, load_eval_config
from tests.helpers.checkpoints import commit, flip_byte, make_export, save
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.manifest import INDEX, Manifest
from verl_ext.checkpoint.save import sync_and_digest
from verl_ext.errors import UserError


def test_step_directory_has_export_run_and_step(tmp_path: Path) -> None:
    export = make_export(tmp_path / "run" / "global_step_40" / "huggingface")
    for named in (export.parent, export):
        checkpoint = find_checkpoint(named)
        assert (checkpoint.export, checkpoint.run_dir, checkpoint.step) == (export, tmp_path / "run", 40)
        assert (checkpoint.path, checkpoint.label) == (export.parent, "step_40")


def test_plain_model_directory_has_no_step(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(make_export(tmp_path / "base"))
    assert (checkpoint.run_dir, checkpoint.step, checkpoint.label) == (None, None, "base")


def test_base_model_is_not_checkpoint_of_run(tmp_path: Path) -> None:
    export = make_export(tmp_path / "run" / "global_step_40" / "huggingface")
    base = base_model(export)
    assert (base.run_dir, base.step, base.label, base.export) == (None, None, "base_step_40", export)


@pytest.mark.parametrize(
    ("name", "label"),
    [("org/name", "org_name"), ("/models/a b:7", "models_a_b_7"), ("../..", "served_model"), ("x" * 300, "x" * 120)],
)
def test_served_model_has_no_export(name: str, label: str, tmp_path: Path) -> None:
    model = served_checkpoint(ServedModel(name, root=None, max_model_len=None), tmp_path)
    assert (model.export, model.label, model.run_dir) == (None, label, None)
    assert model.path.parent == tmp_path


def test_served_model_identity_follows_its_server_card(tmp_path: Path) -> None:
    cards = [
        ServedModel("a", "/m", 96),
        ServedModel("b", "/m", 96),
        ServedModel("a", "/n", 96),
        ServedModel("a", "/m", 64),
    ]
    recipes = [
        load_eval_config(None, ["engine.kind=openai", f"engine.base_url=http://localhost:{port}/v1"]) for port in (1, 2)
    ]
    first, *others = [
        EvalDigests.of(served_checkpoint(card, tmp_path).identity(), "problems", recipes[0], {}) for card in cards
    ]
    assert len({first.model, *(other.model for other in others)}) == 4
    assert EvalDigests.of(served_checkpoint(cards[0], tmp_path).identity(), "problems", recipes[1], {}) == first


def test_served_model_identity_follows_local_files(tmp_path: Path) -> None:
    export = make_export(tmp_path / "model")
    served = served_checkpoint(ServedModel("a", str(export), 96), tmp_path)
    before = served.identity()
    assert served.identity() == before
    with open(export / "model.safetensors", "ab") as file:
        file.write(b"more")
    assert served.identity() != before
    for root in (None, "org/name", str(tmp_path / "none")):
        assert served_checkpoint(ServedModel("a", root, 96), tmp_path).served_files is None


def test_time_limits_do_not_queue_evaluations_again(tmp_path: Path) -> None:
    identity = served_checkpoint(ServedModel("a", "/m", 96), tmp_path).identity()
    recipes = [load_eval_config(None, [f"engine.timeout_s={i}", f"engine.load_timeout_s={i}"]) for i in (1, 2)]
    first, second = (EvalDigests.of(identity, "problems", recipe, {}) for recipe in recipes)
    assert first == second


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no .*weights")],
)
def test_export_without_required_file_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    export = make_export(tmp_path / "base")
    (export / name).unlink()
    with pytest.raises(UserError, match=message):
        find_checkpoint(export)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_export_with_invalid_config_is_rejected(tmp_path: Path, content: str) -> None:
    export = make_export(tmp_path / "base")
    (export / "config.json").write_text(content)
    with pytest.raises(UserError, match="config.json"):
        find_checkpoint(export)


def test_chat_template_is_required_in_either_file(tmp_path: Path) -> None:
    export = make_export(tmp_path / "base")
    (export / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no chat template"):
        find_checkpoint(export)
    (export / "chat_template.jinja").write_text("{{ messages }}")
    assert find_checkpoint(export).export == export


def test_missing_and_truncated_shards_are_rejected(tmp_path: Path) -> None:
    export = make_export(tmp_path / "base")
    (export / INDEX).write_text('{"weight_map": {"w": "model.safetensors", "v": "second.safetensors"}}')
    with pytest.raises(UserError, match="second.safetensors"):
        find_checkpoint(export)
    (export / INDEX).unlink()
    weights = export / "model.safetensors"
    for size in (weights.stat().st_size - 4, 3, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        with pytest.raises(UserError, match="model.safetensors"):
            find_checkpoint(export)


def test_missing_directory_and_missing_export_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        find_checkpoint(tmp_path / "none")
    (tmp_path / "global_step_1").mkdir()
    with pytest.raises(UserError, match="hf_model"):
        find_checkpoint(tmp_path / "global_step_1")


def test_run_directory_is_rejected_as_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    with pytest.raises(UserError, match=f"is a run directory; specify .* such as {tmp_path}/global_step_3"):
        find_checkpoint(tmp_path)


def test_verify_export_detects_changed_byte(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(commit(tmp_path, 3))
    checkpoint.verify_export()
    flip_byte(checkpoint.path / "model.pt")  # not part of the export
    checkpoint.verify_export()
    flip_byte(checkpoint.export / "model.safetensors")
    with pytest.raises(UserError, match="huggingface/model.safetensors has the digest .* --step 3"):
        checkpoint.verify_export()


def test_export_without_manifest_is_accepted(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(make_export(tmp_path / "global_step_3" / "huggingface"))
    checkpoint.verify_export()
    before = checkpoint.identity()
    flip_byte(checkpoint.export / "model.safetensors")
    assert checkpoint.identity() != before


def test_identity_differs_for_resaved_step(tmp_path: Path) -> None:
    first = find_checkpoint(commit(tmp_path, 3)).identity()
    shutil.copytree(tmp_path / "global_step_3", tmp_path / "copy" / "global_step_3")
    assert find_checkpoint(tmp_path / "copy" / "global_step_3").identity() == first
    flip_byte(tmp_path / "copy" / "global_step_3" / "huggingface" / "model.safetensors")
    manifest = Manifest.read(tmp_path / "copy" / "global_step_3")
    name = "huggingface/model.safetensors"
    files = {**manifest.files, name: sync_and_digest(tmp_path / "copy" / "global_step_3" / name)}
    (tmp_path / "copy" / "global_step_3" / "manifest.json").write_text(manifest.with_files(files).to_json())
    assert find_checkpoint(tmp_path / "copy" / "global_step_3").identity() != first


def test_evaluation_digests_are_stable_across_releases(tmp_path: Path) -> None:
    """Recorded with torch 2.9, transformers 4.57 and vLLM 0.12. If a value changes, all evaluations start over."""
    checkpoint = make_export(tmp_path / "run" / "global_step_3" / "huggingface").parent
    files = {"huggingface/model.safetensors": {"bytes": 1, "xxh3_128": "0" * 32}, "model.pt": {"bytes": 2}}
    (checkpoint / "manifest.json").write_text(Manifest(3, 1, "", files).to_json())
    identity, config = find_checkpoint(checkpoint).identity(), load_eval_config("quickstart", [])
    digests = EvalDigests.of(identity, "problems", config, {"numpy": "1.26.4"})
    assert asdict(digests) == {
        "model": "c5dfbd96a29a92daf1d56b441264230e",
        "answers": "1ce555b3da98a15c6048bcc07c27badd",
        "verdicts": "88d7624bd016e817b6e81bd01871093f",
    }


def test_scanner_finds_complete_checkpoints_and_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 9, 100):
        commit(tmp_path, step)
    (commit(tmp_path, 20) / "manifest.json").unlink()
    (commit(tmp_path, 30) / "model.pt").unlink()
    without_export = commit(tmp_path, 50)
    shutil.rmtree(without_export / "huggingface")
    files = {"model.pt": sync_and_digest(without_export / "model.pt")}
    (without_export / "manifest.json").write_text(Manifest(50, 1, "", files).to_json())
    save(tmp_path, 70)  # as with `export.every`: a configuration, but no weights
    stopped = commit(tmp_path, 60)
    (stopped / "huggingface/model.safetensors").rename(tmp_path / "weights")
    complete = Manifest.read(stopped)
    files = {name: entry for name, entry in complete.files.items() if name != "huggingface/model.safetensors"}
    (stopped / "manifest.json").write_text(replace(complete, files=files, deferred=("huggingface",)).to_json())
    discovery = CheckpointScanner(tmp_path)
    for _ in range(2):
        assert [checkpoint.step for checkpoint in discovery.checkpoints()] == [9, 10, 100]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert [line for line in told if "global_step_60: its export is damaged or was skipped; the next start" in line]
    (tmp_path / "weights").rename(stopped / "huggingface/model.safetensors")
    (stopped / "manifest.json").write_text(complete.to_json())
    assert [checkpoint.step for checkpoint in discovery.checkpoints()] == [9, 10, 60, 100]
    shutil.rmtree(stopped)
    told = [line for line in told if "global_step_60" not in line]
    assert "global_step_30: its file model.pt is missing" in told[1] + told[0]
    assert "global_step_20: it has no manifest.json" in told[1] + told[0]
    shutil.rmtree(tmp_path / "global_step_9")
    commit(tmp_path, 110)
    assert [checkpoint.step for checkpoint in discovery.checkpoints()] == [10, 100, 110]


def test_run_without_saves_has_no_checkpoints(tmp_path: Path) -> None:
    assert CheckpointScanner(tmp_path).checkpoints() == []


def test_checkpoint_is_leased_during_evaluation(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(commit(tmp_path, 3))
    with lease_checkpoint(checkpoint):
        assert len(lease_holders(checkpoint.path)) == 1
    assert lease_holders(checkpoint.path) == []
    assert list(checkpoint.path.glob("lease.*")) == []


def test_removed_checkpoint_cannot_be_leased(tmp_path: Path) -> None:
    checkpoint = EvalCheckpoint(tmp_path / "global_step_1", tmp_path / "x", run_dir=tmp_path, step=1)
    with pytest.raises(UserError, match="has just been removed"), lease_checkpoint(checkpoint):
        pass


def test_results_directory_follows_run_model_or_option(tmp_path: Path) -> None:
    of_run = find_checkpoint(commit(tmp_path / "run", 5))
    place = eval_dir_of_checkpoint(of_run, None)
    assert place == eval_dir_of_run(tmp_path / "run") == EvalDir(tmp_path / "run" / "eval", tmp_path / "run")
    assert place.results_of("step_5") == tmp_path / "run" / "eval" / "eval_step_5"
    assert place.work_of("step_5", "d") == tmp_path / "run" / "eval" / "eval_step_5" / "work" / "d"
    plain = find_checkpoint(make_export(tmp_path / "base"))
    assert eval_dir_of_checkpoint(plain, None) == EvalDir(tmp_path / "eval_base", None, one_model=True)
    trial = eval_dir_of_checkpoint(of_run, None, is_trial=True)
    assert trial == EvalDir(tmp_path / "run" / "eval" / "trial_step_5", tmp_path / "run", one_model=True)
    asked = eval_dir_of_checkpoint(of_run, tmp_path / "out")
    assert (asked.results_of("step_5"), asked.run_dir) == (tmp_path / "out", tmp_path / "run")


def test_eval_directory_is_found_by_run_or_by_itself(tmp_path: Path) -> None:
    root = tmp_path / "run" / "eval"
    root.mkdir(parents=True)
    with pytest.raises(UserError, match="contains no evaluation"):
        find_eval_dir(tmp_path / "run")
    (root / LEDGER_FILE).touch()
    assert find_eval_dir(tmp_path / "run") == find_eval_dir(root) == EvalDir(root, tmp_path / "run")
    other = tmp_path / "out"
    other.mkdir()
    (other / LEDGER_FILE).touch()
    assert find_eval_dir(other) == EvalDir(other, None, one_model=True)
    with pytest.raises(UserError, match="is not a directory"):
        eval_dir_of_run(tmp_path / "none")


def test_run_config_is_read_with_defaults(tmp_path: Path) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    assert read_training_run(None) == TrainingRun()
    assert read_training_run(run_dir) == TrainingRun(experiment="first")
    (run_dir / "config.yaml").write_text(
        "eval: {recipe: phase1}\ntrainer: {project_name: demo, experiment_name: sft, wandb_proxy: 'http://proxy'}\n"
    )
    assert read_training_run(run_dir) == TrainingRun("phase1", "demo", "sft", wandb_proxy="http://proxy")
    (run_dir / "config.yaml").write_text("data: {apply_chat_template_kwargs: {enable_thinking: false}}\n")
    assert read_training_run(run_dir).chat_template_kwargs == {"enable_thinking": False}
    (run_dir / "config.yaml").write_text(json.dumps({"eval": {"recipe": None}}))
    assert read_training_run(run_dir) == TrainingRun(experiment="first")


@pytest.mark.parametrize(
    "text",
    [
        "eval: [",
        "- 1\n",
        "eval: {recipe: 3}\n",
        "eval: 3\n",
        "eval: {recipe: '${nowhere}'}\n",
        "data: {apply_chat_template_kwargs: 3}\n",
    ],
)
def test_invalid_run_config_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml"):
        read_training_run(tmp_path)
