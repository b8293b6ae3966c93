"""The example at the start of docs/guides/grpo.md: its files and its command, unchanged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tests.helpers.commands import TrainingRun
from tests.helpers.docs import STEPS, GRPOExample


def test_example_trains_and_prints_documented_output(quickstart: Path, tmp_path: Path) -> None:
    example, repository = GRPOExample(), tmp_path / "repository"
    example.copy_to(repository)
    model = example.settings["model.partial_pretrain"]
    assert example.make_model[-1] == model
    shutil.copytree(quickstart / "model", repository / model)  # in the place of SmolLM2: small, with random weights
    run = TrainingRun(example.train, example.run_dir(repository), imports="vllm", cwd=repository)
    result = run.finish()

    prompts = [json.loads(line) for line in example.files["prompts.jsonl"].splitlines()]
    truths = {prompt["prompt"]: prompt["answer"] for prompt in prompts}
    scope: dict = {}
    exec(example.files["brief.py"], scope)  # noqa: S102
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        [truth] = [truth for prompt, truth in truths.items() if prompt in sample["prompt"]]
        assert sample["reference"] == truth
        assert sample["reward_total"] == sample["brief"] == scope["brief"]("prompts", sample["answer"], truth, {})
    steps = int(example.settings["trainer.total_epochs"]) * len(prompts) // 8
    rows = [row for row in run.rows() if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all("train/brief_mean" in row and not row["train/reward_failures"] for row in rows)
    assert list((run.run_dir / f"global_step_{steps}/huggingface").glob("*.safetensors"))
    assert form_of(result.stdout) == form_of(example.printed)


def form_of(output: str) -> set[str]:
    """The step lines without numbers, and without the ETA, which the page omits."""
    lines = (line.partition(" | ETA")[0] for line in STEPS.findall(output))
    return {re.sub(r"-?\d[\d.,]*(e-\d+)?", "0", line) for line in lines}
