"""An evaluation on a Ray cluster of two simulated nodes: the same as on one machine, also when a node dies.

The nodes are real raylets of this machine, the workers real actors with vLLM and a judge each.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from eval_pipeline.engines.answer import Sampling
from eval_pipeline.executors.ray import RayExecutor
from eval_pipeline.recipe.load import load_recipe
from eval_pipeline.work.batch import Batch, BatchId, Event, Failed
from tests.helpers import ROOT
from tests.helpers.models import learn, make_model, make_tokenizer, save
from tests.helpers.processes import children_of, family_of, words_of
from verl_ext.errors import UserError

NUM_PROBLEMS = 300
BODIES = ("x + 1", "x - 1", "x / 0", "(x")
OBJECT_STORE_BYTES = 100 * 2**20
TIMES = ("avg_judge_time", "cost_per_solved_judge_time", "throughput")
RECIPE = """
datasets: {{sums: {{format: quickstart, path: {problems}}}}}
tiers: {{tier1: [sums]}}
batch_size: 4
sampling: {{max_tokens: 64}}
engine: {{dtype: float32}}
judge: {{limits: {{cpu_s: 5.0}}}}
wandb: false
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `model/` that knows a few of the problems by heart, `problems.jsonl` and `recipe.yaml`."""
    directory = tmp_path_factory.mktemp("inputs")
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    problems = [
        {"problem_id": f"p{i}", "prompt": f"Do number {i}.", "entry_point": "f", "tests": tests}
        for i in range(NUM_PROBLEMS)
    ]
    answers = {f"Do number {i}.": f"```python\ndef f(x):\n    return {BODIES[i % 4]}\n```" for i in range(8)}
    tokenizer = make_tokenizer([*answers, *answers.values()])
    model = make_model(tokenizer, max_model_len=128)
    learn(model, tokenizer, answers)
    save(directory / "model", model, tokenizer)
    (directory / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (directory / "recipe.yaml").write_text(RECIPE.format(problems=directory / "problems.jsonl"))
    return directory


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and one more node, with sockets and logs in a directory of their own."""
    directory = tempfile.mkdtemp(prefix="r")  # the path of a socket has at most 107 characters
    node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(directory)


class Run:
    """`run` in a process of its own, and what it leaves."""

    def __init__(self, inputs: Path, output: Path, *overrides: str) -> None:
        self.output, self._log = output, output.with_suffix(".log")
        command = [sys.executable, "-m", "eval_pipeline", "run", "--checkpoint", str(inputs / "model")]
        command += ["--recipe", str(inputs / "recipe.yaml"), "--output", str(output), *overrides]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)

    def finish(self) -> str:
        """Wait for the end; returns what it printed."""
        printed, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, self.told
        return printed

    @property
    def told(self) -> str:
        return self._log.read_text()

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.told.splitlines() if not line.startswith("Evaluating model on sums: ")]

    def rows(self, name: str) -> dict[str, dict[str, Any]]:
        """Stored answers or verdicts by problem; each is there once."""
        (path,) = self.output.glob(f"work/sums/{name}-*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        by_problem = {row["problem_id"]: row for row in rows}
        assert len(by_problem) == len(rows)
        return by_problem

    def result(self) -> tuple[Any, ...]:
        """Answers, verdicts and figures, without what is measured in seconds."""
        verdicts = {key: {**row, "judge_time": None} for key, row in self.rows("verdicts").items()}
        metrics = json.loads((self.output / "metrics.json").read_text())
        figures = {key: value for key, value in metrics["datasets"]["sums"].items() if key not in TIMES}
        return self.rows("answers"), verdicts, figures, metrics["protocol"], metrics["isolation"]

    @property
    def num_answers(self) -> int:
        """How many are stored so far."""
        return sum(path.read_bytes().count(b"\n") for path in self.output.glob("work/sums/answers-*.jsonl"))

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many are stored."""
        self.wait_until(lambda: self.num_answers >= count)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something to happen during the run."""
        deadline = time.monotonic() + 180
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < deadline, self.told
            time.sleep(0.02)


def on_ray(cluster: Cluster, *overrides: str) -> list[str]:
    return ["executor.kind=ray", f"executor.address={cluster.address}", *overrides]


def actors() -> set[psutil.Process]:
    """The workers on the nodes of these tests."""
    raylets = [each for each in family_of(psutil.Process()) if "".join(words_of(each)[:1]).endswith("/raylet")]
    return {each for raylet in raylets for each in children_of(raylet) if is_worker(each)}


def is_worker(process: psutil.Process) -> bool:
    return "WorkerActor" in "".join(words_of(process))


def worker_processes() -> list[psutil.Process]:
    """The workers, with their engines and judges and all that those started."""
    return [each for actor in actors() for each in [actor, *family_of(actor)]]


def count_of(module: str) -> int:
    """How many of the workers' processes run a module."""
    return sum(module in " ".join(words_of(process)) for process in worker_processes())


def keep_up_until(is_so: Callable[[], bool], executor: RayExecutor) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        events = executor.events(0.2)
        assert not events and time.monotonic() < deadline


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The result on one machine."""
    run = Run(inputs, tmp_path_factory.mktemp("local") / "out")
    run.finish()
    result = run.result()
    assert len(result[0]) == len(result[1]) == NUM_PROBLEMS
    assert {"success", "wrong_answer"} <= {row["error_type"] for row in result[1].values()}
    return result


def test_where_there_is_no_cluster_it_says_how_to_start_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        recipe = load_recipe(None, ["executor.kind=ray", f"executor.address={address}"])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(UserError, match=f"{address}.*ray start --head.*executor.address"), RayExecutor(recipe):
            pass
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_protocol_of_rays_client_is_refused() -> None:
    recipe = load_recipe(None, ["executor.kind=ray", "executor.address=ray://127.0.0.1:10001"])
    with pytest.raises(UserError, match="host:port"), RayExecutor(recipe):
        pass


def test_the_workers_follow_the_cluster(cluster: Cluster) -> None:
    recipe = load_recipe(None, ["executor.kind=ray", f"executor.address={cluster.address}"])
    with RayExecutor(recipe) as executor:
        keep_up_until(lambda: len(actors()) == 2, executor)
        keep_up_until(lambda: executor.has_room_for(None), executor)
        lost = actors().pop()
        lost.kill()
        keep_up_until(lambda: lost not in actors() and len(actors()) == 2, executor)
        node = cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        keep_up_until(lambda: len(actors()) == 3, executor)
        cluster.remove_node(node)
        keep_up_until(lambda: len(actors()) == 2, executor)
    assert not actors()


def test_a_worker_that_cannot_judge_says_so(cluster: Cluster) -> None:
    recipe = load_recipe(None, ["executor.kind=ray", f"executor.address={cluster.address}"])
    object.__setattr__(recipe, "isolation", "none")  # the level that a node lacks; all known ones may work here
    batch = Batch(BatchId("step_1", "sums", "digest", 0), None, {}, (), Sampling())
    with RayExecutor(recipe) as executor:
        keep_up_until(lambda: executor.has_room_for(None), executor)
        executor.submit(batch)
        failed: list[Event] = []
        while not failed:
            failed = executor.events(60)
    assert len(failed) == 1 and isinstance(failed[0], Failed)
    assert failed[0].batch == batch.id and "isolation 'none' does not exist" in failed[0].error


def test_a_cluster_gives_what_one_machine_gives(
    inputs: Path, cluster: Cluster, undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    run = Run(inputs, tmp_path / "out", *on_ray(cluster))
    run.wait_until(lambda: len(actors()) == 2)  # one on each node
    printed = run.finish()
    assert run.result() == undisturbed
    assert not run.warnings and printed.startswith("Evaluated: model\n")
    assert not actors()


def test_a_killed_driver_leaves_no_process_on_the_nodes(inputs: Path, cluster: Cluster, tmp_path: Path) -> None:
    run = Run(inputs, tmp_path / "out", *on_ray(cluster))
    run.wait_for_answers(1)
    # the second worker may still be on its way when the first has answered
    run.wait_until(lambda: count_of("judge.server") == 2 and count_of("vllm_process") >= 1)
    workers = worker_processes()
    run.process.kill()
    run.process.wait()
    run.process.stdout.close()
    _, left = psutil.wait_procs(workers, timeout=60)
    assert not left


def test_work_of_a_killed_node_is_done_again(
    inputs: Path, cluster: Cluster, undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    # with two workers asked for, the lost one is replaced on the node that is left
    run = Run(inputs, tmp_path / "out", *on_ray(cluster, "executor.num_workers=2"))
    run.wait_for_answers(20)
    (node,) = cluster.worker_nodes
    (raylet,) = node.all_processes["raylet"]
    on_node = psutil.Process(raylet.process.pid).children(recursive=True)
    assert any(map(is_worker, on_node))
    cluster.remove_node(node, allow_graceful=False)  # SIGKILL
    assert run.num_answers < NUM_PROBLEMS
    printed = run.finish()
    assert run.result() == undisturbed
    assert len(run.warnings) == 1 and "is lost" in run.warnings[0]
    assert printed.startswith("Evaluated: model\n")  # not a word of Ray's
    with sqlite3.connect(run.output / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT state, attempts FROM jobs").fetchall() == [("done", 0)]
    _, left = psutil.wait_procs(on_node, timeout=60)
    assert not left
