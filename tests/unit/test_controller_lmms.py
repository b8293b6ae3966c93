"""The lmms-eval plugin, tested without lmms-eval: arguments, requests, answers and their log."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.helpers import ROOT
from tests.helpers.data import row
from tests.helpers.vlms import SUFFIX, write_controller, write_model
from verl_ext.controller.evaluation.lmms import LmmsModelArgs, LmmsQuestion, LmmsResponder
from verl_ext.controller.execution import NUM_WARM_UPS, VLMRunner
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.vlm import load_controller
from verl_ext.errors import UserError

NUM_DOCUMENTS = 3
DOCUMENTS = {"cards": {"test": [row(number) for number in range(NUM_DOCUMENTS)]}}


@dataclass(frozen=True)
class Asked:
    """The part of an lmms-eval request that the plugin reads."""

    args: tuple[Any, ...]


def image_of(document: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(document["image"]["bytes"]))


def asked(number: int = 0, text: str = "", visuals: Any = lambda document: [image_of(document)], **settings: Any):
    question = text or DOCUMENTS["cards"]["test"][number]["question"]
    return Asked((question, settings, visuals, number, "cards", "test"))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lmms")
    return write_controller(directory / "controller", write_model(directory / "model"))


@pytest.fixture(scope="module")
def model(export: Path) -> AdaptiveModel:
    controller, controlled = load_controller(export)
    return AdaptiveModel(controlled.runner("cpu", torch.float32), controller)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's export names the model's weights in single precision."""
    monkeypatch.setattr("verl_ext.controller.inference.default_device", lambda _: ("cpu", torch.float32))


def responder(export: Path, log: Path | None = None, budget_ms: float = 40.0) -> LmmsResponder:
    return LmmsResponder(LmmsModelArgs(export, budget_ms, log=log))


def test_plugin_needs_neither_verl_nor_vllm() -> None:
    """The environment of lmms-eval has neither."""
    code = "import sys; sys.modules.update(verl=None, vllm=None); import verl_ext.controller.evaluation.lmms"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


# Arguments


def test_arguments_parsed_by_lmms_eval_are_accepted() -> None:
    words = {"pretrained": "~/run", "budget_ms": 30, "log": "a.jsonl", "vlm": 7, "batch_size": "1", "device": "cpu"}
    assert LmmsModelArgs.parse(words) == LmmsModelArgs(Path.home() / "run", 30.0, "7", Path("a.jsonl"), "cpu")
    assert LmmsModelArgs.parse({"pretrained": "x", "budget_ms": 0.5, "batch_size": 1}) == LmmsModelArgs(Path("x"), 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "needs pretrained and budget_ms; set them in --model_args"),
        ({"pretrained": "x"}, "needs budget_ms"),
        ({"pretrained": "x", "budget_ms": "fast"}, "budget_ms=fast must be a number"),
        ({"pretrained": "x", "budget_ms": True}, "must be a number"),
        ({"pretrained": "x", "budget_ms": 0}, "above 0"),
        ({"pretrained": "x", "budget_ms": float("nan")}, "above 0"),
        ({"pretrained": "x", "budget_ms": 1, "budgets": 3, "dtype": "x"}, "has no argument budgets, dtype; it has pre"),
        ({"pretrained": "x", "budget_ms": 1, "batch_size": 8}, "set --batch_size to 1"),
        ({"pretrained": "x", "budget_ms": 1, "batch_size": "auto", "max_batch_size": 4}, "set --batch_size to 1"),
    ],
)
def test_bad_arguments_are_rejected(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LmmsModelArgs.parse(words)


# Requests


def test_question_gets_training_suffix_once() -> None:
    texts = {"what ?": "what ?" + SUFFIX, "<image>\nwhat ?": "what ?" + SUFFIX, "what ?\nShort:": "what ?\nShort:"}
    for text, expected in texts.items():
        assert LmmsQuestion.from_request(asked(1, text), DOCUMENTS, SUFFIX).text == expected
    found = LmmsQuestion.from_request(asked(1, "what ?", until="\n", max_new_tokens=8), DOCUMENTS, "")
    assert (found.text, found.task, found.split, found.doc_id) == ("what ?", "cards", "test", 1)
    assert found.settings == {"max_new_tokens": 8} and found.image.mode == "RGB"
    assert found.image.tobytes() == image_of(DOCUMENTS["cards"]["test"][1]).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("until", "expected"),
    [(None, "a, b\n\nc."), ([], "a, b\n\nc."), ("", "a, b\n\nc."), ("\n\n", "a, b"), (["\n\n", ","], "a"), ("a", "")],
)
def test_answer_ends_before_until(until: Any, expected: str) -> None:
    assert LmmsQuestion.from_request(asked(until=until), DOCUMENTS, "").truncate("a, b\n\nc.") == expected


@pytest.mark.parametrize(
    ("visuals", "message"),
    [
        (lambda document: [image_of(document)] * 2, r"document 0 of cards has 2 visuals \(PngImageFile, PngImageFile"),
        (lambda _: [], r"has 0 visuals \(none\), but"),
        (lambda _: None, r"has 0 visuals \(none\), but"),
        (lambda _: ["film.mp4"], r"has 1 visuals \(str\), but"),
    ],
)
def test_questions_without_exactly_one_image_are_rejected(visuals: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LmmsQuestion.from_request(asked(visuals=visuals), DOCUMENTS, "")


# Answers


@pytest.mark.parametrize("budget_ms", [30.0, 60.0])
def test_answers_equal_model_answers_and_are_logged(
    export: Path, model: AdaptiveModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget_ms: float
) -> None:
    log = tmp_path / "logs/answers.jsonl"
    order = [2, 0, 1]
    answers = responder(export, log, budget_ms).respond([asked(number) for number in order], DOCUMENTS)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    space = load_controller(export)[0].space
    for number, answer, line in zip(order, answers, rows, strict=True):
        document = DOCUMENTS["cards"]["test"][number]
        expected = model.answer(image_of(document).convert("RGB"), document["question"] + SUFFIX, budget_ms)
        chosen = expected.configuration
        assert answer == line["answer"] == expected.answer
        assert line["tier"] == space.tiers[chosen.tier] and line["complexity"] == space.complexity(chosen)
        assert line["blocks"] == list(map(int, chosen.blocks)) and line["topk"] == list(chosen.topk)
        assert (line["task"], line["split"], line["doc_id"], line["budget_ms"]) == ("cards", "test", number, budget_ms)
        parts = line["decision_ms"] + line["vision_ms"] + line["prefill_ms"] + line["decode_ms"]
        assert line["total_ms"] == pytest.approx(parts) and line["is_late"] == (parts > budget_ms)
        assert 0 < line["network_ms"] < line["decision_ms"] and set(asdict(expected.latency)) <= set(line)
    late = sum(line["is_late"] for line in rows)
    assert f"3 answers, {sum(line['total_ms'] for line in rows) / 3:.1f} ms on average, {late} above" in (
        capsys.readouterr().out
    )


def test_logged_answer_is_truncated_like_returned_answer(export: Path, tmp_path: Path) -> None:
    [whole] = responder(export).respond([asked()], DOCUMENTS)
    [cut] = responder(export, tmp_path / "log").respond([asked(until=whole[-1])], DOCUMENTS)
    assert cut == json.loads((tmp_path / "log").read_text())["answer"] == whole.split(whole[-1])[0].strip()


def test_ignored_settings_are_reported_once_per_task(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answering = responder(export)
    kept = {"max_new_tokens": 3, "do_sample": False, "temperature": 0.0, "num_beams": 1, "top_p": None, "until": ["\n"]}
    answering.respond([asked(**kept)], DOCUMENTS)
    assert "warning" not in capsys.readouterr().err
    other = responder(export)
    other.respond([asked(number, **{**kept, "max_new_tokens": 16, "top_p": 0.9}) for number in range(2)], DOCUMENTS)
    shown = capsys.readouterr().err
    assert shown.count("warning: cards sets max_new_tokens=16, top_p=0.9, which has no effect") == 1


def test_warm_up_runs_once(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    answer = VLMRunner.answer

    def counted(self: VLMRunner, *arguments: Any, **options: Any) -> Any:
        runs.append(arguments[1].tier)
        return answer(self, *arguments, **options)

    monkeypatch.setattr(VLMRunner, "answer", counted)
    answering = responder(export)
    answering.respond([asked(0), asked(1)], DOCUMENTS)
    assert len(runs) == NUM_WARM_UPS * (1 + 3) + 2 and set(runs) == {0, 1, 2}
    answering.respond([asked(2)], DOCUMENTS)
    assert len(runs) == NUM_WARM_UPS * (1 + 3) + 3


# What cannot be


def test_budget_outside_training_range_gets_warning(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    responder(export, budget_ms=61.0)
    assert "warning: the controller was trained for 30 to 60 ms, not for 61" in capsys.readouterr().err


def test_multiple_processes_are_rejected(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without accelerate or torchrun"):
        responder(export)


def test_non_empty_log_is_rejected(export: Path, tmp_path: Path) -> None:
    empty, full = tmp_path / "empty.jsonl", tmp_path / "full.jsonl"
    empty.touch()
    full.write_text("{}\n")
    responder(export, empty)
    with pytest.raises(UserError, match="full.jsonl has answers of another run; specify another log"):
        responder(export, full)
    with pytest.raises(UserError, match="cannot be written"):
        responder(export, full / "log")
    assert full.read_text() == "{}\n"


def test_directory_without_controller_is_rejected(export: Path) -> None:
    with pytest.raises(UserError, match="has no export of a budget controller"):
        responder(export.parent / "model")
    with pytest.raises(UserError, match="cannot be loaded"):
        LmmsResponder(LmmsModelArgs(export, 40.0, vlm=str(export.parent / "nowhere")))
