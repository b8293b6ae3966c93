"""The commands `importance` and `calibrate`, on a tiny model on disk."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn

from tests.helpers import vlms
from tests.helpers.data import question
from verl_ext.controller import latency
from verl_ext.controller.adapters import Inputs, VLMAdapter
from verl_ext.controller.calibrate import load_inputs, model_parser
from verl_ext.controller.calibrate import main as calibrate_command
from verl_ext.controller.config import PERCENTILES
from verl_ext.controller.importance import load_importance, measure_importance, save_importance
from verl_ext.controller.importance import main as importance_command
from verl_ext.controller.latency import FEATURES, LatencyModel, ModeledLatency, calibrate, measured_on
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.space import select_blocks
from verl_ext.controller.vlm import fingerprint, load_adapter
from verl_ext.errors import UserError

SIZES = (1024, 4096, 9216)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `model/` and `train.parquet`."""
    directory = tmp_path_factory.mktemp("vlm")
    model, processor = vlms.qwen3_vl_moe()
    model.save_pretrained(directory / "model")
    processor.save_pretrained(directory / "model")
    rows = [
        {"image": {"bytes": question(n).image, "path": None}, "question": f"what is {n} ?", "answers": ["a cat"] * 10}
        for n in range(3)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    return directory


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the `main` of a command in this process: `run(main, output, *more)`."""

    def call(main: Callable[[], None], output: Path, *more: str) -> Done:
        words = ["--model", str(saved / "model"), "--questions", str(saved), "--tier-sizes", *map(str, SIZES)]
        words += ["--output", str(output), "--num-questions", "2", *more]
        monkeypatch.setattr(sys, "argv", ["command", *words])
        code = 0
        try:
            main()
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    return call


def test_importance_is_loss_increase_of_skipping_block(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run(importance_command, tmp_path / "importance.json")
    assert done.returncode == 0, done.stderr
    adapter = load_adapter(str(saved / "model"), SIZES)
    found = load_importance(tmp_path / "importance.json", adapter)
    assert set(found) == {1, 2, 3}
    assert json.loads((tmp_path / "importance.json").read_text())["model"] == fingerprint(adapter.model)
    answer = adapter.tokenizer("a cat")["input_ids"]
    asked = [adapter.inputs(question(n).load_image(), f"what is {n} ?", 2) for n in range(2)]
    answered = [vlms.continued(inputs, answer) for inputs in asked]

    def loss(blocks: list[bool]) -> float:
        total = 0.0
        with torch.no_grad(), adapter.configured(adapter.space(1, 4, (4,)).configuration(2, blocks)):
            for whole in answered:
                logits, wanted = adapter.model(**whole).logits[0, :-1], whole["input_ids"][0, 1:]
                total += float(torch.nn.functional.cross_entropy(logits[-len(answer) :], wanted[-len(answer) :]))
        return total / 2

    full = loss([True] * 4)
    for block, score in found.items():
        assert score == pytest.approx(loss([each != block for each in range(4)]) - full, abs=1e-3)
    assert f"block {max(found, key=found.get):>3}" == done.stdout.splitlines()[0][:9]


def test_select_blocks_uses_importance_or_first_blocks(saved: Path, tmp_path: Path) -> None:
    adapter, path = load_adapter(str(saved / "model"), SIZES), tmp_path / "scores.json"
    assert select_blocks(2, 4, None) == [True, True, False, False]
    for content in ({"merged_scores": {"1": 0.1, "2": -1, "3": 0.5}}, {"1": 0.1, "2": -1, "3": 0.5}):
        path.write_text(json.dumps(content))
        assert select_blocks(3, 4, load_importance(path, adapter)) == [True, True, False, True]
        assert select_blocks(1, 4, load_importance(path, adapter)) == [True, False, False, False]


def test_scores_of_another_model_are_rejected(saved: Path, tmp_path: Path) -> None:
    adapter, path = load_adapter(str(saved / "model"), SIZES), tmp_path / "scores.json"
    other = load_adapter(str(saved / "model"), SIZES)
    with torch.no_grad():
        other.model.model.language_model.embed_tokens.weight[0, 0] += 1
    save_importance(path, measure_importance(other, [question(0)]), other)
    assert set(load_importance(path, other)) == {1, 2, 3}
    with pytest.raises(UserError, match="the weights or their dtype differ; create .*importance --dtype fp32`"):
        load_importance(path, adapter)
    path.write_text(json.dumps({str(block): 1.0 for block in range(1, 7)}))
    with pytest.raises(UserError, match="scores for 6 blocks, but this model has 4; create"):
        load_importance(path, adapter)
    for score in ("NaN", "-Infinity", "1e39"):
        path.write_text(f'{{"importance_scores": {{"1": 0.5, "2": {score}, "3": 0.1}}}}')
        with pytest.raises(UserError, match="has no block importance .the score of block 2 is"):
            load_importance(path, adapter)
    path.write_text('{"importance_scores": [1, 2]}')
    with pytest.raises(UserError, match="has no block importance"):
        load_importance(path, adapter)


def test_fingerprint_depends_on_type_and_weights() -> None:
    def named(*weights: torch.Tensor, model_type: str = "llama") -> str:
        model: Any = nn.ParameterList([nn.Parameter(each) for each in weights])
        model.config = SimpleNamespace(model_type=model_type)
        return fingerprint(model)

    matrix, experts, bias = torch.randn(6, 9), torch.randn(2, 6, 9), torch.randn(9)
    name = named(matrix, experts, bias)
    assert name.startswith("2:llama:")
    # transformers 5 orders parameters differently, and stores some experts transposed
    assert named(bias, experts.transpose(1, 2).contiguous(), matrix) == name
    assert named(matrix, experts, bias, model_type="qwen2") != name
    assert named(matrix, experts, torch.cat([bias, bias])) != name
    for place in range(3):
        changed = [matrix.clone(), experts.clone(), bias.clone()]
        changed[place].flatten()[1] += 1
        assert named(*changed) != name


def test_calibration_records_its_quality(run: Run, saved: Path, tmp_path: Path) -> None:
    more = ["--topk-choices", "1", "4", "--configurations", "10", "--repeats", "1", "--max-new-tokens", "2"]
    done = run(calibrate_command, tmp_path / "latency.json", *more)
    assert done.returncode == 0, done.stderr
    found = LatencyModel.load(tmp_path / "latency.json")
    assert found.model == fingerprint(load_adapter(str(saved / "model"), SIZES).model)
    assert f"held-out configurations: {found.r2:.4f}" in done.stdout
    assert (
        f"a decision by a controller of this width takes {found.deciding_ms:.2f} ms" in done.stdout
        and found.deciding_ms > 0
    )
    assert list(found.scatter) == list(map(str, PERCENTILES))
    assert 0 < found.scatter["50"] <= found.scatter["75"] <= found.scatter["90"] <= found.scatter["95"]
    assert f"95% within {found.scatter['95']:.2f}" in done.stdout
    assert {part: tuple(weights) for part, weights in found.coefficients.items()} == FEATURES


@pytest.mark.parametrize("command", [calibrate_command, importance_command])
def test_model_is_measured_in_given_dtype(command: Callable[[], None], run: Run, saved: Path, tmp_path: Path) -> None:
    more = ["--configurations", "10", "--repeats", "1", "--max-new-tokens", "1", "--topk-choices", "4"]
    done = run(command, tmp_path / "x.json", "--dtype", "bf16", *(more if command is calibrate_command else ()))
    assert done.returncode == 0, done.stderr
    bf16, fp32 = (load_adapter(str(saved / "model"), SIZES, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    recorded = json.loads((tmp_path / "x.json").read_text())
    assert recorded["model"] == fingerprint(bf16.model)
    if command is calibrate_command:
        assert recorded["machine"] == measured_on(bf16)
        with pytest.raises(UserError, match="another model or dtype; .*calibrate --dtype fp32`"):
            ModeledLatency.load(tmp_path / "x.json", fp32)


def test_questions_are_those_of_run(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(question(1).image)
    (tmp_path / "questions").mkdir()
    rows = pa.Table.from_pylist([{"image": "one.png", "question": "what is it ?", "answers": ["a cat"]}])
    parquet.write_table(rows, tmp_path / "questions/train.parquet")
    words = ["--model", saved / "model", "--questions", tmp_path / "questions", "--tier-sizes", *SIZES]
    words += ["--images", tmp_path, "--question-suffix", " Think.", "--output", tmp_path / "x.json"]
    [asked] = load_inputs(model_parser("importance", "", "").parse_args(list(map(str, words))))[1]
    assert asked.question == "what is it ? Think." and asked.image == tmp_path / "one.png"


def test_decisions_are_timed_with_controller_of_given_width(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []

    class Noted(BudgetController):
        def __init__(self, config: BudgetControllerConfig) -> None:
            widths.append(config.hidden)
            super().__init__(config)

    monkeypatch.setattr(latency, "BudgetController", Noted)
    monkeypatch.setattr(latency, "QUIET", math.inf)  # however busy this machine is
    words = ["--model", saved / "model", "--questions", saved, "--tier-sizes", *SIZES, "--output", tmp_path / "x.json"]
    sizes = ["--num-questions", 1, "--topk-choices", 4, "--configurations", 10, "--repeats", 1, "--max-new-tokens", 1]
    monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, [*words, *sizes, "--hidden", 24])])
    calibrate_command()
    assert widths == [24]


def test_calibrations_measure_same_configurations(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load_adapter(str(saved / "model"), SIZES)
    space, ran = adapter.space(2, 4, (1, 4)), []
    generate = type(adapter).generate

    def noted(self: VLMAdapter, inputs: Inputs, *more: Any) -> list[int]:
        ran.append(len(inputs["pixel_values"]))
        return generate(self, inputs, *more)

    monkeypatch.setattr(type(adapter), "generate", noted)
    monkeypatch.setattr(latency, "QUIET", math.inf)  # however busy this machine is
    for _ in range(2):
        calibrate(adapter, space, [question(0), question(1)], 10, 2, 1)
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :] and len(set(ran)) == 3


@pytest.mark.parametrize(
    ("scatters", "costs", "kept"),
    [
        ([1.05], [30.0], 0),
        ([1.6, 1.1], [50.0, 31.0], 1),
        ([1.6, 1.4, 1.5, 1.3], [50.0, 40.0, 45.0, 41.0], 1),
    ],
)
def test_noisy_calibration_is_repeated_and_fastest_fit_kept(
    scatters: list[float], costs: list[float], kept: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [LatencyModel({}, 1.0, "", "", 0.0, {"90": each}) for each in scatters]
    results = iter(zip(models, costs))
    monkeypatch.setattr(latency, "fit_latency_model", lambda *_: next(results))
    adapter = load_adapter(str(saved / "model"), SIZES)
    assert calibrate(adapter, adapter.space(2, 4, (1, 4)), [question(0)], 10, 1, 1) is models[kept]
    assert next(results, None) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--configurations", "3"], "'3' is not an integer of 10 or more"),
        (["--topk-choices", "1", "2"], "--topk-choices=[1, 2] must end with 4"),
        (["--topk-choices", "4", "1", "4"], "--topk-choices is [4, 1, 4]; it must be a list of ascending integers"),
        (["--topk-choices", "4", "--min-active", "9"], "--min-active=9 exceeds"),
        (["--tier-sizes", "9216", "2304"], "--tier-sizes=[9216, 2304] must be ascending"),
    ],
)
def test_bad_arguments_print_one_sentence(more: list[str], message: str, run: Run, tmp_path: Path) -> None:
    done = run(calibrate_command, tmp_path / "x.json", *more)
    [error] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and message in error and done.stderr.endswith(f"{error}\n")


def test_directory_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vision-language model .* cannot be loaded .*specify a model.s directory"):
        load_adapter(str(tmp_path), SIZES)
