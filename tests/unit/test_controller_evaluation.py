"""The command `adaptive`, on a tiny model with its controller."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import parquet

from eval_pipeline.__main__ import main
from tests.helpers import vlms
from tests.helpers.data import question
from tests.helpers.vlms import TIERS, write_controller
from tests.helpers.wandb_files import read_history, read_records, values_of
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.controller.adapters import adapter_for
from verl_ext.controller.evaluation import measure
from verl_ext.controller.evaluation.evaluate import AdaptiveEvalConfig, load_questions
from verl_ext.controller.evaluation.results import (
    ResultMatrices,
    lookup_table,
    method_rows,
    pareto_front,
    summarize_comparison,
)
from verl_ext.controller.evaluation.statics import NUM_FAVORITES, important_blocks, static_grid
from verl_ext.controller.execution import RunWorkload, VLMRunner
from verl_ext.controller.importance import load_importance, save_importance
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.latency import FEATURES, LatencyModel
from verl_ext.controller.scoring import soft_accuracy
from verl_ext.controller.source import ControllerSource
from verl_ext.controller.space import Configuration, ConfigurationSpace, cheapest_configuration
from verl_ext.controller.vlm import fingerprint, load_adapter, load_controller
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset
from verl_ext.metrics.registry import lookup_metric

SHORT = ("--num-samples", "3", "--num-train", "2", "--max-static", "5", "--no-wandb")


def tiny_questions() -> list[ImageQuestion]:
    """Five questions, each with one configuration's answer as its reference."""
    runner = VLMRunner(adapter_for(*vlms.qwen3_vl_moe(), TIERS), max_new_tokens=3)
    space = runner.adapter.space(2, 4, (1, 2, 4))
    asked = [question(number) for number in range(5)]
    ways = [
        space.full,
        cheapest_configuration(space, None),
        space.configuration(1, [True] * 4, 2),
        space.full,
        space.full,
    ]
    answers = [runner.run(each, way).answer for each, way in zip(asked, ways)]
    return [
        ImageQuestion(each.sample_id, each.image, each.question, (text or "none",))
        for each, text in zip(asked, answers)
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `model/`, `data/` and `run/`, whose newest checkpoint is incomplete."""
    directory = tmp_path_factory.mktemp("adaptive")
    model, processor = vlms.qwen3_vl_moe()
    model.save_pretrained(directory / "model")
    processor.save_pretrained(directory / "model")
    (directory / "data").mkdir()
    rows = [
        {
            "image": {"bytes": each.image, "path": None},
            "question": each.question,
            "answers": list(each.references),
            "question_id": each.sample_id,
        }
        for each in tiny_questions()
    ]
    parquet.write_table(pa.Table.from_pylist(rows[:2]), directory / "data/train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows[2:]), directory / "data/val.parquet")
    write_run(directory)
    return directory


def write_run(directory: Path) -> None:
    adapter, run = load_adapter(str(directory / "model"), TIERS), directory / "run"
    write_controller(run / "global_step_2/huggingface", directory / "model", suffix="")
    (run / "global_step_2/manifest.json").write_text(Manifest(2, 1, "", {}).to_json())
    shutil.copytree(run / "global_step_2/huggingface", run / "global_step_4/huggingface")
    columns = "epoch,reward_mean,accuracy_mean,latency_mean,budget_violation_rate"
    for name in ("training_history.csv", "validation_history.csv"):
        (run / name).write_text(f"{columns}\n1,0.2,0.5,40.0,0.1\n2,0.4,0.75,35.0,0.0\n")
    save_importance(directory / "importance.json", {1: 0.1, 2: 0.5, 3: 0.3}, adapter)
    weights = {part: dict.fromkeys(names, 0.0) for part, names in FEATURES.items()}
    weights["vision_ms"]["patches"], weights["prefill_ms"]["blocks"], weights["decode_ms"]["experts"] = 0.2, 3.0, 0.1
    LatencyModel(weights, 1.0, "none", fingerprint(adapter.model)).save(run / "latency_model.json")
    config = {
        "data": {"datasets": {"tiny": {"source": str(directory / "data")}}, "max_unreadable_images": 0},
        "controller": {"dtype": "auto", "importance_file": str(directory / "importance.json")},
        "latency": {"file": None, "percentile": 90},
        "trainer": {"project_name": "tiny", "experiment_name": "budget"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def configuration_of(described: dict[str, Any], space: ConfigurationSpace) -> Configuration:
    blocks = [runs == "1" for runs in described["blocks"]]
    return space.configuration(space.tiers.index(described["tier"]), blocks, described["topk"])


def adaptive(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["adaptive", *map(str, words)])
    return left.value.code


@pytest.fixture(scope="module")
def evaluated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of an evaluation with the latency model."""
    output = tmp_path_factory.mktemp("by_model")
    options = ("--latency", "model", "--num-budgets", "3", "--search-questions", "0", "--output", output)
    assert adaptive("--checkpoint", tiny / "run", *options, *SHORT) == 0
    return output


def test_output_files_are_consistent(evaluated: Path) -> None:
    content = json.loads((evaluated / "adaptive.json").read_text())
    arrays = np.load(evaluated / "adaptive.npz")
    assert content["step"] == 2 and content["budgets_ms"] == [30.0, 45.0, 60.0]
    assert all((evaluated / name).read_bytes().startswith(b"\x89PNG") for name in ("pareto.png", "curves.png"))

    def of(name: str) -> ResultMatrices:
        return ResultMatrices(*(arrays[f"{name}_{part}"] for part in ("accuracy", "latency_ms", "complexity")))

    methods = ["controller", "lookup_table", "oracle", "random", "full"]
    rows = [row for name in methods for row in method_rows(name, of(name), content["budgets_ms"])]
    assert [vars(row) for row in rows] == content["rows"]
    table = [entry["static"] for entry in content["lookup_table"]]
    assert table == lookup_table(of("train"), content["budgets_ms"])
    assert np.array_equal(of("lookup_table").accuracy, of("statics").accuracy[:, table])
    assert content["pareto_front"] == pareto_front(of("statics"))
    means = of("statics").latency_ms.mean(0).tolist()
    assert [each["held_out"]["latency_ms_mean"] for each in content["statics"]] == pytest.approx(means)
    compared = {name: of(name) for name in ("controller", "lookup_table", "oracle")}
    deciding = dict(zip(("decision_ms", "features_ms", "network_ms", "choice_ms"), arrays["deciding_ms"].mean((0, 1))))
    full_ms = content["summary"]["full_ms"]
    again = vars(summarize_comparison(compared, content["budgets_ms"], deciding, full_ms, 0.0))
    assert json.loads(json.dumps(again)) == content["summary"]
    page = (evaluated / "adaptive.md").read_text()
    protocol = content["protocol"]
    assert (protocol["latency_percentile"], protocol["trained_latency_percentile"]) == (50, 90)
    assert "ms by the latency model; measured: features" in page and "the encoding of the image alone" not in page
    assert "(pareto.png)" in page and "(curves.png)" in page
    assert all(f"| {row.method} | {row.budget_ms:.1f} | {100 * row.accuracy:.1f}% |" in page for row in rows)


def test_results_equal_rerun_of_configurations(tiny: Path, evaluated: Path) -> None:
    arrays = np.load(evaluated / "adaptive.npz")
    controller, controlled = load_controller(tiny / "run/global_step_2/huggingface")
    model = AdaptiveModel(controlled.runner("cpu", torch.float32), controller)
    adapter, space = model.runner.adapter, controller.space
    content = json.loads((evaluated / "adaptive.json").read_text())
    statics = [configuration_of(each["configuration"], space) for each in content["statics"]]
    trained = ImageQuestionDataset({"tiny": QuestionSource(train=2, source=str(tiny / "data"))}, "train").samples
    budgets = content["budgets_ms"]
    decided = [model.answer(each.load_image(), each.question, ms).configuration for each in trained for ms in budgets]
    liked = Counter(replace(each, tier=0) for each in decided).most_common(NUM_FAVORITES)
    masks = important_blocks(space, load_importance(tiny / "importance.json", adapter))
    grid = static_grid(space, masks, 5)
    everywhere = {replace(each, tier=tier) for each, _ in liked for tier in range(len(space.tiers))}
    assert {*statics} == {*grid} | everywhere and not everywhere <= {*grid} and len({*statics}) == len(statics)
    told = LatencyModel.load(tiny / "run/latency_model.json")
    chosen = set()
    for place, row in enumerate(parquet.read_table(tiny / "data/val.parquet").to_pylist()):
        sample = ImageQuestion(row["question_id"], row["image"]["bytes"], row["question"], tuple(row["answers"]))
        for column, configuration in enumerate(statics):
            outcome = model.runner.run(sample, configuration)
            assert arrays["statics_accuracy"][place, column] == soft_accuracy(outcome.answer, sample.references)
            assert arrays["statics_latency_ms"][place, column] == told.predict(outcome.workload).total_ms
        low = model.runner.encoded(sample, 0)
        encoding = told.predict(RunWorkload(space.full, adapter.num_patches(low.inputs), 0, 0)).vision_ms
        for column, budget in enumerate((30.0, 45.0, 60.0)):
            found = model.answer(sample.load_image(), sample.question, budget)
            outcome = model.runner.run(sample, found.configuration)
            latency = told.predict(outcome.workload).total_ms + (encoding if found.configuration.tier else 0.0)
            assert arrays["controller_latency_ms"][place, column] == latency
            assert arrays["controller_accuracy"][place, column] == soft_accuracy(found.answer, sample.references)
            assert arrays["controller_complexity"][place, column] == space.complexity(found.configuration)
            chosen.add(found.configuration)
            choice = [arrays[f"controller_{part}"][place, column] for part in ("tier", "blocks", "topk")]
            tier, blocks, topk = (each.tolist() for each in choice)
            assert Configuration(tier, tuple(blocks), tuple(topk)) == found.configuration
        assert arrays["sample_ids"][place] == f"val/tiny/{row['question_id']}"
    assert len(chosen) > 1 and len(np.unique(arrays["statics_accuracy"])) > 1
    assert (arrays["deciding_ms"] > 0).any()


def test_latency_model_results_are_reproducible(
    tiny: Path, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The latency model was fitted on the machine `none`, which causes a warning."""
    by_model = ("--latency", "model", "--num-budgets", "3", "--search-questions", "0")
    options = (*by_model, "--repeats", "2", "--output", tmp_path)
    assert adaptive("--checkpoint", tiny / "run/global_step_2", *options, *SHORT) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "latency model" in warning and "'none'" in warning
    one, other = (json.loads((path / "adaptive.json").read_text()) for path in (evaluated, tmp_path))
    assert all(one[part] == other[part] for part in ("rows", "statics", "lookup_table", "pareto_front"))
    arrays = np.load(evaluated / "adaptive.npz")
    draws = arrays["random_complexity"]
    assert adaptive("--checkpoint", tiny / "run", *by_model, "--seed", "1", "--output", tmp_path, *SHORT) == 0
    assert not np.array_equal(np.load(tmp_path / "adaptive.npz")["random_complexity"], draws)


def test_measured_latencies_include_decision(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(measure, "DISTURBED", math.inf)  # each run once, however busy this machine is
    export = tiny / "run/global_step_2/huggingface"
    assert adaptive("--checkpoint", export, "--budgets", "2e6", "1e6", *SHORT[:-1]) == 0
    output = tiny / "run/eval/adaptive_step_2"
    content = json.loads((output / "adaptive.json").read_text())
    arrays = np.load(output / "adaptive.npz")
    assert content["budgets_ms"] == [1e6, 2e6] and content["protocol"]["latency"] == "measured"
    methods = ["controller", "lookup_table", "oracle", "random", "full"]
    assert [row["method"] for row in content["rows"][::2]] == methods
    assert all(row["violation_rate"] == 0.0 for row in content["rows"])
    assert content["summary"]["full_ms"] == pytest.approx(arrays["full_latency_ms"][:, 0].mean())
    assert content["summary"]["network_share"] == content["summary"]["network_ms"] / content["summary"]["full_ms"]
    deciding = arrays["deciding_ms"]
    assert (deciding[..., 0] >= deciding[..., 1:].sum(-1) - 1e-9).all() and (deciding > 0).all()
    shown = capsys.readouterr()
    assert "trained for 30 to 60 ms, not for 1e+06, 2e+06" in shown.err and "controller - lookup table" in shown.out
    check_wandb(tiny / "run", content)


def check_wandb(run: Path, content: dict[str, Any]) -> None:
    [path] = run.glob("wandb/offline-run-*/run-*.wandb")
    history, records = read_history(path), read_records(path)
    metrics = [row for row in history if "eval/adaptive/budget_ms" in row]
    assert [row["eval/adaptive/budget_ms"] for row in metrics] == [1e6, 2e6]
    assert {row["global_step"] for row in history} == {2}
    for row in content["rows"]:
        logged = next(each for each in metrics if each["eval/adaptive/budget_ms"] == row["budget_ms"])
        assert logged[f"eval/adaptive/{row['method']}_accuracy"] == row["accuracy"]
    axes = {record.metric.name: record.metric.step_metric for record in records if record.HasField("metric")}
    names = [name for name in metrics[0] if name.startswith("eval/adaptive/")]
    assert all(axes[name] == "eval/adaptive/budget_ms" for name in names if not name.endswith("/budget_ms"))
    [started] = [record.run for record in records if record.HasField("run")]
    assert (started.display_name, started.project, started.run_group) == ("adaptive_eval_step_2", "tiny", "budget")
    summary = {}
    for record in records:
        if record.HasField("summary"):
            summary.update(values_of(record.summary.update))
    assert summary["eval/adaptive/network_share"] == content["summary"]["network_share"]
    numbers = [name for name, value in summary.items() if isinstance(value, int | float) and name.count("/") == 2]
    assert all(lookup_metric(name) for name in numbers if name.startswith("eval/")) and set(names) <= set(numbers)


def test_export_without_run_takes_questions_from_folder(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path))
    export = shutil.copytree(tiny / "run/global_step_2/huggingface", tmp_path / "export")
    moved = shutil.copytree(tiny / "model", tmp_path / "moved")
    options = ("--questions", tiny / "data", "--vlm", moved, "--budgets", "1e6", *SHORT)
    assert adaptive("--checkpoint", export, *options) == 0
    content = json.loads((tmp_path / "adaptive/adaptive.json").read_text())
    assert content["step"] is None and content["vlm"]["path"] == str(moved)
    assert not (tmp_path / "adaptive/curves.png").exists()
    assert content["protocol"]["importance_file"] is None and content["protocol"]["num_samples"] == 3


def eval_config(**values: Any) -> AdaptiveEvalConfig:
    """A configuration with the number of questions in `SHORT`; options that do not select questions are null."""
    options = dict.fromkeys(each.name for each in fields(AdaptiveEvalConfig)) | {"num_samples": 3, "num_train": 2}
    return AdaptiveEvalConfig(**{**options, **values})


@pytest.mark.parametrize(
    ("metrics", "option", "used"),
    [
        (["cider"], None, "cider"),
        (["cider"], "vqa", "vqa"),
        (["cider", "vqa"], None, "vqa"),
        ([], None, "vqa"),
        ([], "cider", "cider"),
    ],
)
def test_other_questions_have_metric_of_run_or_option(
    metrics: list[str], option: str | None, used: str, tiny: Path, tmp_path: Path
) -> None:
    datasets = {str(number): {"source": "elsewhere", "metric": metric} for number, metric in enumerate(metrics)}
    config = {"data": {"datasets": datasets}, "controller": {}, "latency": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    source = ControllerSource(tmp_path / "huggingface", tmp_path)
    splits = load_questions(source, eval_config(questions=tiny / "data", metric=option), "")
    assert {question.metric for split in splits for question in split} == {used}


def test_images_of_other_questions_are_read_from_given_folder(tmp_path: Path) -> None:
    for name in ("questions", "images"):
        (tmp_path / name).mkdir()
    (tmp_path / "images/one.png").write_bytes(question(1).image)
    rows = pa.Table.from_pylist([{"image": "one.png", "question": "what is it ?", "answers": ["a cat"]}])
    for split in ("train", "val"):
        parquet.write_table(rows, tmp_path / f"questions/{split}.parquet")
    config = eval_config(questions=tmp_path / "questions", images=tmp_path / "images")
    [[sample], _] = load_questions(ControllerSource(tmp_path / "huggingface"), config, " Think.")
    assert sample.image == tmp_path / "images/one.png" and sample.question == "what is it ? Think."


# Bad input


@pytest.mark.parametrize(
    ("checkpoint", "options", "message"),
    [
        ("model", (), "has no export of a budget controller"),
        ("data", (), "has no export of a budget controller"),
        ("nowhere", (), "has no export of a budget controller"),
        (
            "run",
            ("--latency", "model", "--budgets", "1e-3"),
            "--budgets starts at 0.001 ms, but the cheapest configuration and the decision for it",
        ),
        ("run", ("--questions", "{tiny}/model"), r"has no train\*.parquet"),
        ("run", ("--metric", "cider"), "--metric has no effect without --questions"),
        ("run", ("--vlm", "{tiny}/other"), "was trained for a model other than"),
        ("run", ("--vlm", "{tiny}/nowhere"), "cannot be loaded"),
        ("alone", (), "no questions are given; set --questions"),
        ("alone", ("--questions", "{tiny}/data", "--latency", "model"), "is not a latency model"),
        ("misfit", ("--latency", "model"), "was fitted on another model"),
        ("hesitant", ("--latency", "model"), "the default of --budgets starts at 30 ms, .* for it take 10"),
        ("foreign", (), "not a configuration of the stage budget"),
    ],
)
def test_bad_input_prints_one_sentence(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    make_bad(tiny)
    words = [option.format(tiny=tiny) for option in options]
    assert adaptive("--checkpoint", tiny / checkpoint, *words, "--output", tmp_path / "out", *SHORT) == 2
    shown = capsys.readouterr().err
    error = shown[shown.index("error: ") :]
    assert len(error.splitlines()) == 1 and re.search(message, error), shown
    assert not (tmp_path / "out").exists()


def test_unwritable_output_is_rejected_before_measuring(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    options = ("--latency", "model", "--output", tmp_path / "file/out")
    assert adaptive("--checkpoint", tiny / "run", *options, *SHORT) == 2
    assert "specify another --output" in capsys.readouterr().err and (tmp_path / "file").read_text() == ""


def make_bad(tiny: Path) -> None:
    """Add another model, an export without a run, runs that lack something, and one of slow decisions."""
    if (tiny / "other").exists():
        return
    model, processor = vlms.qwen3_vl_moe(seed=1)
    model.save_pretrained(tiny / "other")
    processor.save_pretrained(tiny / "other")
    export = tiny / "run/global_step_2/huggingface"
    shutil.copytree(export, tiny / "alone")
    for name in ("misfit", "foreign", "hesitant"):
        shutil.copytree(tiny / "run", tiny / name, ignore=shutil.ignore_patterns("wandb", "eval"))
    for name, changed in {"misfit": {"model": "another"}, "hesitant": {"deciding_ms": 1000.0}}.items():
        path = tiny / name / "latency_model.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    (tiny / "foreign/config.yaml").write_text("data: {}\n")


@pytest.mark.parametrize(
    "words", [("--num-samples", "0"), ("--budgets", "-5"), ("--budgets", "nan"), ("--latency", "x")]
)
def test_bad_numbers_are_rejected_before_loading(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert adaptive("--checkpoint", "x", *words) == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err
