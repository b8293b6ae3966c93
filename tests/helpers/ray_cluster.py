"""A Ray cluster of simulated nodes on this machine, and evaluations that run on it.

The nodes are real raylets, and the workers are real actors with vLLM and a judge each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.commands import environment
from tests.helpers.evaluation import command, evaluate, num_kept, problem, read_lines, write_recipe
from tests.helpers.processes import WAIT_S, children_of, family_of, wait_until, words_of

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
BODIES = ("x + 1", "x - 1", "x / 0", "(x")
TIMES = ("avg_judge_time", "cost_per_solved_judge_time", "throughput")


@contextmanager
def cluster_of_two() -> Iterator[Cluster]:
    """A head node and a worker node with a separate directory for sockets and logs."""
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="r")  # the path of a socket has at most 107 characters
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(directory)


def make_inputs(directory: Path, num_problems: int) -> Path:
    """Write `recipe.yaml`, and `model/`, which has been trained on the answers to some of the problems."""
    from transformers import AutoTokenizer

    from tests.helpers.models import learn, make_model, make_tokenizer, save

    tests = ["import time\ntime.sleep(0.1)\nassert f(1) == 2", "assert f(2) == 3"]
    problems = [problem(f"p{i}", f"f: do number {i}.", *tests) for i in range(num_problems)]
    bodies = [BODIES[i % len(BODIES)] for i in range(8)]
    answers = {each["prompt"]: f"```python\ndef f(x):\n    return {body}\n```" for each, body in zip(problems, bodies)}
    tokenizer = make_tokenizer([*answers, *answers.values()])
    model = make_model(tokenizer, max_model_len=128)
    save(directory / "model", model, tokenizer)
    # as it will be read: transformers 5 gives every tokenizer of a Qwen2 that model's own split into words
    learn(model, AutoTokenizer.from_pretrained(directory / "model"), answers)
    model.save_pretrained(directory / "model")
    keys = {"batch_size": 4, "sampling": {"max_tokens": 64}, "wandb": False}
    write_recipe(directory / "recipe.yaml", {"tier1": {"sums": problems}}, **keys)
    return directory


def words_for(inputs: Path, output: Path) -> tuple[str | Path, ...]:
    """The command line that evaluates the model of `make_inputs` on one machine."""
    return ("run", "--checkpoint", inputs / "model", "--recipe", inputs / "recipe.yaml", "--output", output)


def evaluated_locally(inputs: Path, output: Path, num_problems: int) -> tuple[Any, ...]:
    """The result of an evaluation on one machine."""
    process = evaluate(*words_for(inputs, output))
    assert process.returncode == 0, process.stderr
    result = result_in(output)
    assert len(result[0]) == len(result[1]) == num_problems
    assert {"success", "wrong_answer"} <= {row["error_type"] for row in result[1].values()}
    return result


def result_in(output: Path) -> tuple[Any, ...]:
    """Answers, verdicts and metrics in an output directory, without what is measured in seconds."""
    verdicts = {key: {**row, "judge_time": None} for key, row in rows_in(output, "verdicts").items()}
    metrics = json.loads((output / "metrics.json").read_text())
    values = {key: value for key, value in metrics["datasets"]["sums"].items() if key not in TIMES}
    return rows_in(output, "answers"), verdicts, values, metrics["protocol"], metrics["isolation"]


def rows_in(output: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Stored `answers` or `verdicts` by problem; each is stored once."""
    (path,) = output.glob(f"work/sums/{kind}-*.jsonl")
    rows = read_lines(path)
    by_problem = {row["problem_id"]: row for row in rows}
    assert len(by_problem) == len(rows)
    return by_problem


class RayEvaluation:
    """`run` on a cluster.

    It runs in a new process, because the command sets variables before it imports Ray.

    Args:
        inputs: directory from `make_inputs`.
        output: the output directory.
        cluster: cluster that runs the workers.
        overrides: recipe overrides.
    """

    def __init__(self, inputs: Path, output: Path, cluster: Cluster, *overrides: str) -> None:
        self.output, self._log = output, output.with_suffix(".log")
        on_ray = ("executor.kind=ray", f"executor.address={cluster.address}")
        words = command(*words_for(inputs, output), *on_ray, *overrides)
        options = {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "text": True}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(words, stderr=log, **options)

    def __enter__(self) -> RayEvaluation:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def finish(self) -> str:
        """Wait for the end; returns standard output."""
        printed, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, self.log
        return printed

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text()

    @property
    def warnings(self) -> list[str]:
        """The lines on standard error that are not a progress bar."""
        return [line for line in self.log.splitlines() if not line.startswith("Evaluating model on sums: ")]

    @property
    def num_answers(self) -> int:
        """Number of answers that are stored."""
        return num_kept(self.output, "answers")

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Poll a condition while the evaluation runs."""
        wait_until(condition, self.process)


def actors() -> set[psutil.Process]:
    """The workers on the nodes that this process has started."""
    raylets = [each for each in family_of(psutil.Process()) if "".join(words_of(each)[:1]).endswith("/raylet")]
    return {each for raylet in raylets for each in children_of(raylet) if is_worker(each)}


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker of an evaluation."""
    return "WorkerActor" in "".join(words_of(process))


def worker_processes() -> list[psutil.Process]:
    """The workers and the processes of their engines and judges."""
    return [each for actor in actors() for each in [actor, *family_of(actor)]]


def count_of(module: str, processes: list[psutil.Process] | None = None) -> int:
    """Number of the workers' processes, or of these, that run a module."""
    found = worker_processes() if processes is None else processes
    return sum(module in " ".join(words_of(process)) for process in found)
