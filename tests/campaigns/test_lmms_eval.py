"""Campaign: the model class in lmms-eval itself, found by its registry and run on a task from a local folder."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import ROOT

if TYPE_CHECKING:
    from verl_ext.controller.inference import AdaptiveAnswer

BUDGET_MS = 40.0
NUM_DOCUMENTS = 2
TASK = """
task: two_questions
dataset_path: parquet
dataset_kwargs: {{data_files: {{validation: {data}}}}}
test_split: validation
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.text
doc_to_target: answers
process_results: !function utils.compare
generation_kwargs: {{max_new_tokens: 16, until: ["\\n\\n"]}}
metric_list: [{{metric: exact, aggregation: mean, higher_is_better: true}}]
"""
FUNCTIONS = """
import io

from PIL import Image


def images(document):
    return [Image.open(io.BytesIO(document["image"]["bytes"]))]


def text(document):
    return "<image>" + document["question"]


def compare(document, results):
    return {"exact": float(results[0] == document["answers"][0])}
"""
REFUSALS = """
import sys
from lmms_eval.models import get_model
model = get_model("budget_controller").create_from_arg_string(sys.argv[1], {"batch_size": 1, "device": None})
for way in (model.loglikelihood, model.generate_until_multi_round):
    try:
        way([])
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that has lmms-eval."""
    if named := os.environ.get("VERL_EXT_LMMS_PYTHON"):
        return named
    if importlib.util.find_spec("lmms_eval") is None:
        pytest.skip(
            "lmms-eval is not installed, because it conflicts with the product's wandb; create an environment from "
            "requirements/lmms.in and set VERL_EXT_LMMS_PYTHON to its interpreter"
        )
    return sys.executable


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, `controller/` and `task/`; the model's first answer is the reference and its second is not."""
    import pyarrow as pa
    from pyarrow import parquet

    from tests.helpers.data import row
    from tests.helpers.vlms import write_controller, write_model

    directory = tmp_path_factory.mktemp("lmms_eval")
    write_controller(directory / "controller", write_model(directory / "model"))
    first, second = (row(number) for number in range(NUM_DOCUMENTS))
    (directory / "task").mkdir()
    answers = [expected_answers(directory)[0].answer], ["surely not this"]
    rows = [{**document, "answers": list(each)} for document, each in zip((first, second), answers)]
    parquet.write_table(pa.Table.from_pylist(rows), directory / "task/val.parquet")
    (directory / "task/two_questions.yaml").write_text(TASK.format(data=directory / "task/val.parquet"))
    (directory / "task/utils.py").write_text(FUNCTIONS)
    return directory


def expected_answers(inputs: Path) -> list[AdaptiveAnswer]:
    """The answers of the same model in this process."""
    import torch
    from PIL import Image

    from tests.helpers.data import row
    from tests.helpers.vlms import SUFFIX
    from verl_ext.controller.inference import AdaptiveModel
    from verl_ext.controller.vlm import load_controller

    controller, controlled = load_controller(inputs / "controller")
    model = AdaptiveModel(controlled.runner("cpu", torch.float32), controller)
    documents = (row(number) for number in range(NUM_DOCUMENTS))
    return [
        model.answer(
            Image.open(io.BytesIO(document["image"]["bytes"])).convert("RGB"), document["question"] + SUFFIX, BUDGET_MS
        )
        for document in documents
    ]


def run(python: str, inputs: Path, *words: str) -> str:
    """Run the interpreter to its end; returns its output."""
    environment = {
        **os.environ,
        **{"LMMS_EVAL_PLUGINS": "eval_pipeline.lmms", "HF_HOME": str(inputs / "hf"), "CUDA_VISIBLE_DEVICES": ""},
    }
    finished = subprocess.run([python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def test_controller_answers_a_local_task(python: str, inputs: Path) -> None:
    output, log = inputs / "output", inputs / "answers.jsonl"
    arguments = f"pretrained={inputs / 'controller'},budget_ms={BUDGET_MS},log={log}"
    shown = run(
        python,
        inputs,
        *("-m", "lmms_eval", "--model", "budget_controller", "--model_args", arguments),
        *("--tasks", "two_questions", "--include_path", str(inputs / "task"), "--device", "cpu"),
        *("--output_path", str(output), "--log_samples"),
    )
    [results] = output.rglob("*_results.json")
    assert json.loads(results.read_text())["results"]["two_questions"]["exact,none"] == 0.5, shown
    [samples] = output.rglob("*_samples_two_questions.jsonl")
    answered = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    rows, expected = [json.loads(line) for line in log.read_text().splitlines()], expected_answers(inputs)
    assert answered == [line["answer"] for line in rows] == [each.answer for each in expected]
    assert [line["blocks"] for line in rows] == [list(map(int, each.configuration.blocks)) for each in expected]
    assert [line["doc_id"] for line in rows] == [0, 1] and all(line["total_ms"] > 0 for line in rows)
    assert "max_new_tokens=16" in shown and "budget_controller: 2 answers" in shown


def test_unsupported_requests_are_rejected(python: str, inputs: Path) -> None:
    shown = run(python, inputs, "-c", REFUSALS, f"pretrained={inputs / 'controller'},budget_ms={BUDGET_MS}")
    refusals = re.findall("UserError (.*)", shown)
    assert len(refusals) == 2 and "likelihood" in refusals[0] and "one question" in refusals[1]
