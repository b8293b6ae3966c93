"""Recorded names and values that code changes must keep, and functions by which tests read them.

The functions below `check_snapshot` are the only place where the tests of recorded values import the product: a move or
a rename needs an edit here and nowhere else.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SNAPSHOTS = ROOT / "tests/data/snapshots"
RECORDS = bool(os.environ.get("SNAPSHOT_UPDATE"))
"""Whether to write the snapshots. Every test that does so fails."""
HOME = "/home/user"
"""HOME of commands that tests run, so that snapshots do not contain a real home directory."""
LAUNCHER_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_PORT", "VERL_EXT_CALLED_FROM")


def check_snapshot(name: str, found: Any) -> None:
    """Compare a value with the snapshot `tests/data/snapshots/NAME`.

    With SNAPSHOT_UPDATE=1 in the environment, write the snapshot and fail.

    Args:
        name: file name of the snapshot.
        found: what JSON can hold; 1, 1.0 and true differ.
    """
    path, text = SNAPSHOTS / name, json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if RECORDS:
        refuse_names_of_this_machine(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path.relative_to(ROOT)} is written; review its diff, then run again without SNAPSHOT_UPDATE")
    if not path.exists():
        pytest.fail(f"there is no {path.relative_to(ROOT)}; SNAPSHOT_UPDATE=1 writes it")
    lines = difflib.unified_diff(
        path.read_text().splitlines(), text.splitlines(), "recorded", "found", n=1, lineterm=""
    )
    difference = "\n".join(lines)
    if difference:
        pytest.fail(f"{path.relative_to(ROOT)} no longer holds:\n{difference}", pytrace=False)


def refuse_names_of_this_machine(text: str) -> None:
    """Fail if a text contains a path or the name of this machine."""
    for name in (str(ROOT), f"{Path.home()}/", "/tmp/", f'"{socket.gethostname()}"'):
        assert name not in text, f"the snapshot would have {name}"


def flat(content: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; an empty mapping is a value."""
    from verl_ext.config.run_config import flat_values

    return flat_values(content)


def run_modules(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run `python -m MODULE WORD...` for each command, all in one new process; each must succeed.

    Returns:
        The standard output of each.
    """
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.run_modules"],
        input=json.dumps(commands),
        cwd=ROOT,
        env={**variables, "HOME": HOME, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def recipes_of(folder: str) -> list[str]:
    """Names of the shipped recipes of a folder of `recipes/`."""
    return sorted(path.stem for path in (ROOT / "recipes" / folder).glob("*.yaml"))


def metric_units() -> list[tuple[str, str]]:
    """Name and unit of each metric, in the order of the reference page."""
    from verl_ext.metrics.registry import SECTIONS

    return [(name, metric.unit) for section in SECTIONS.values() for name, metric in section.by_name().items()]


def exit_codes() -> dict[str, int]:
    """The exit codes that all commands share."""
    from verl_ext import errors

    return {
        "bad input": errors.USER_ERROR_EXIT_CODE,
        "health rule": errors.UNHEALTHY_EXIT_CODE,
        "stop signal": errors.STOPPED_EXIT_CODE,
    }


def config_digest_of(command: str, *words: str) -> str:
    """The digest of a run's configuration, as in `run.json` and `manifest.json`."""
    from verl_ext.config.run_config import config_digest
    from verl_ext.config.schema import as_dict
    from verl_ext.trainer.stages import load_config

    return config_digest(as_dict(load_config(command, words)))


def evaluation_config(recipe: str) -> dict[str, Any]:
    """The resolved configuration of an evaluation, by the keys of its YAML."""
    from eval_pipeline.recipe import load_eval_config
    from verl_ext.config.schema import as_dict

    return as_dict(load_eval_config(recipe))


def evaluation_digests(recipe: str, checkpoint: Path) -> dict[str, str]:
    """The digests that name the files of an evaluation and its row of the ledger."""
    from dataclasses import asdict

    from eval_pipeline.checkpoints import find_checkpoint
    from eval_pipeline.recipe import EvalDigests, load_eval_config

    identity, packages = find_checkpoint(checkpoint).identity(), {"numpy": "1.26.4"}
    return asdict(EvalDigests.of(identity, "problems", load_eval_config(recipe), packages))


def problems_digest_of(format: str, path: Path) -> str:
    """The digest of the problems of a file."""
    from eval_pipeline.problems.datasets import load_problems, problems_digest
    from eval_pipeline.problems.problem import DatasetSource

    return problems_digest(load_problems(DatasetSource("any", format, str(path))))


def answer_seed(problem_id: str, sample: int, seed: int) -> int | None:
    """The seed of one answer in an evaluation."""
    from eval_pipeline.config import SamplingConfig
    from eval_pipeline.engines import GenerateRequest, request_seed

    return request_seed(GenerateRequest(problem_id, "any prompt", sample), SamplingConfig(temperature=1.0, seed=seed))


def completion_seed(run_seed: int, step: int, sample_id: str, number: int) -> int:
    """The seed of one completion in the stage grpo, and of one configuration in the stage budget."""
    from verl_ext.grpo.sampling import sample_seed

    return sample_seed(run_seed, step, sample_id, number)


def token_numbers(seed: int, count: int) -> list[float]:
    """The random numbers by which the tokens of a completion are chosen."""
    from verl_ext.grpo.sampling import seeded_uniforms

    return seeded_uniforms(seed, count).tolist()


def sample_ids(data: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The ids of the prompts of a file, from which seeds derive."""
    from verl_ext.data.prompts import load_prompts
    from verl_ext.trainer.stages import load_config

    words = [f"data.{key}={value}" for key, value in data.items()]
    config = load_config("grpo", [*words, "data.eval_every_steps=0"])
    train, _ = load_prompts(config.data, tokenizer)
    return [train[index]["sample_id"] for index in range(len(train))]


def tokenize(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[int]]]:
    """Tokenize the training data of a configuration; the cache is what `data.token_cache` says.

    Returns:
        The tokens of each sample.
    """
    from verl_ext.data.chats import load_chats
    from verl_ext.trainer.stages import load_config

    train, _ = load_chats(load_config("sft", words).data, tokenizer)
    samples = [train[index] for index in range(len(train))]
    return [{name: sample[name].int().tolist() for name in ("input_ids", "loss_mask")} for sample in samples]


def training_data_digest_of(*paths: Path) -> str:
    """The digest of a run's training data, which checkpoints hold."""
    from verl_ext.data.config import ChatDataConfig
    from verl_ext.data.dataset import training_data_digest

    return training_data_digest(ChatDataConfig(train_files=[str(path) for path in paths]))


def model_fingerprint(model: Any) -> str:
    """The name of a vision-language model's weights, which measurements and controllers hold."""
    from verl_ext.controller.vlm import fingerprint

    return fingerprint(model)
