"""Evaluation commands, problems for them, and a model trained to answer these problems."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.helpers import ROOT, warm
from tests.helpers.commands import environment

if TYPE_CHECKING:
    from eval_pipeline.jobs import Job

MAX_MODEL_LEN = 96
LEARNED = {
    "add: write the function add.": "Here:\n```python\ndef add(a, b):\n    return a + b\n```",
    "neg: write the function neg.": "```python\ndef neg(a):\n    return a\n```\nEasy.",
    "two: write the function two.": "```python\ndef two(:\n```",
}
"""What the model answers to each prompt: a correct answer, a wrong one and one with a syntax error."""
ADD, NEG, TWO = LEARNED


def problem(name: str, prompt: str, *tests: str) -> dict[str, Any]:
    """A problem in the quickstart's format; its entry point is the first word of the prompt."""
    return {"problem_id": name, "prompt": prompt, "entry_point": prompt.partition(":")[0], "tests": list(tests)}


HEART = [
    problem("add", ADD, "assert add(1, 2) == 3"),
    problem("neg", NEG, "assert neg(1) == -1", "assert neg(0) == 0"),
    problem("two", TWO, "assert two() == 2"),
    problem("long", "f: " + "word " * 100, "assert f()"),  # exceeds the model's context length
]


def slow_problems(number: int, seconds: float) -> list[dict[str, Any]]:
    """Problems that the trained model solves; judging takes `seconds` each."""
    tests = [f"import time\ntime.sleep({seconds})\nassert add({i}, 2) == {i + 2}" for i in range(number)]
    return [problem(f"slow{i}", ADD, test) for i, test in enumerate(tests)]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON Lines; the directory is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a JSON Lines file, which may be in the middle of a write or not exist yet."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def num_kept(work: Path, kind: str) -> int:
    """Number of `answers` or `verdicts` on disk below a directory."""
    return sum(path.read_bytes().count(b"\n") for path in work.glob(f"**/work/*/{kind}-*.jsonl"))


def write_recipe(path: Path, tiers: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], **keys: Any) -> Path:
    """Write a recipe and its datasets.

    Args:
        path: path of the recipe.
        tiers: name of a tier to name of a dataset to its problems.
        keys: further keys of the recipe.
    """
    datasets = {name: problems for of_tier in tiers.values() for name, problems in of_tier.items()}
    files = {name: write_lines(path.parent / f"{name}.jsonl", problems) for name, problems in datasets.items()}
    recipe = {
        "datasets": {name: {"format": "quickstart", "path": str(file)} for name, file in files.items()},
        "tiers": {tier: list(of_tier) for tier, of_tier in tiers.items()},
        "engine": {"dtype": "float32"},
        "judge": {"limits": {"cpu_s": 5.0}},
        "poll_s": 0.5,
        **keys,
    }
    path.write_text(yaml.safe_dump(recipe))
    return path


def make_exports(directory: Path) -> tuple[Path, Path]:
    """A model that has been trained on `LEARNED`, and one with random weights."""
    from tests.helpers.models import learn, make_model, make_tokenizer, save

    tokenizer = make_tokenizer(LEARNED.values())
    random = save(directory / "random", make_model(tokenizer, MAX_MODEL_LEN), tokenizer)
    model = make_model(tokenizer, MAX_MODEL_LEN)
    learn(model, tokenizer, LEARNED)
    return save(directory / "learned", model, tokenizer), random


def command(*words: str | Path) -> list[str]:
    """The command line of an evaluation command."""
    return [sys.executable, "-m", "eval_pipeline", *map(str, words)]


def evaluate(*words: str | Path, imports: str = "vllm") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return warm.run(command(*words), imports=imports, cwd=ROOT, env=environment())


@contextmanager
def started(log: Path, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the background; its output is appended to `log`, and it has ended after the block."""
    with open(log, "ab") as output:
        options = {"cwd": ROOT, "env": environment(), "stdout": output, "stderr": output}
        process = warm.popen(command(*words), imports="vllm", **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def jobs(directory: Path) -> list[Job]:
    """The jobs in the ledger of a run or of an evaluation; empty before there is a ledger."""
    from eval_pipeline.checkpoints import find_eval_dir
    from eval_pipeline.jobs import JobQueue
    from verl_ext.errors import UserError

    try:
        place = find_eval_dir(directory)
    except UserError:
        return []
    with closing(JobQueue(place.root)) as ledger:
        return ledger.jobs()


def statuses(directory: Path) -> list[dict[str, Any]]:
    """The rows of `status --json`."""
    return [json.loads(line) for line in evaluate("status", directory, "--json").stdout.splitlines()]
