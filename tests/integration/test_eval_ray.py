"""An evaluation on a Ray cluster of two simulated nodes: the same results as on one machine, even if a node dies."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.helpers.evaluation import jobs
from tests.helpers.processes import family_of, wait_gone, wait_until
from tests.helpers.ray_cluster import (
    RayEvaluation,
    actors,
    cluster_of_two,
    count_of,
    evaluated_locally,
    is_worker,
    make_inputs,
    result_in,
)

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from eval_pipeline.config import EvalConfig
    from eval_pipeline.ray_pool import RayPool

NUM_PROBLEMS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of_two() as cluster:
        yield cluster


def recipe_for(address: str) -> EvalConfig:
    from eval_pipeline.recipe import load_eval_config

    return load_eval_config(None, ["executor.kind=ray", f"executor.address={address}"])


def poll_until(condition: Callable[[], bool], executor: RayPool) -> None:
    """Poll the executor until the condition holds."""

    def holds() -> bool:
        assert not executor.events(0.2)
        return condition()

    wait_until(holds)


def test_missing_cluster_error_says_how_to_start_one() -> None:
    from eval_pipeline.ray_pool import RayPool
    from verl_ext.errors import UserError

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(UserError, match=f"{address}.*ray start --head.*executor.address"):
            RayPool(recipe_for(address)).__enter__()
        assert signal.getsignal(signal.SIGTERM) is before


def test_rejects_ray_client_address() -> None:
    from eval_pipeline.ray_pool import RayPool
    from verl_ext.errors import UserError

    with pytest.raises(UserError, match="host:port"):
        RayPool(recipe_for("ray://127.0.0.1:10001")).__enter__()


def test_workers_follow_cluster_size(cluster: Cluster) -> None:
    from eval_pipeline.ray_pool import RayPool
    from tests.helpers.ray_cluster import NODE

    with RayPool(recipe_for(cluster.address)) as executor:
        poll_until(lambda: len(actors()) == 2, executor)
        poll_until(lambda: executor.has_room_for(None), executor)
        lost = actors().pop()
        lost.kill()
        poll_until(lambda: lost not in actors() and len(actors()) == 2, executor)
        node = cluster.add_node(**{**NODE, "num_cpus": 1})
        poll_until(lambda: len(actors()) == 3, executor)
        cluster.remove_node(node)
        poll_until(lambda: len(actors()) == 2, executor)
    assert not actors()


def test_gpus_of_new_node_replace_workers_without_gpus(cluster: Cluster) -> None:
    from eval_pipeline.ray_pool import RayPool
    from tests.helpers.ray_cluster import NODE

    with RayPool(recipe_for(cluster.address)) as executor:
        poll_until(lambda: executor.has_room_for(None), executor)
        without = actors()
        node = cluster.add_node(**NODE, num_gpus=3)
        poll_until(lambda: len(actors()) == 3 and not without & actors(), executor)
        poll_until(lambda: executor.has_room_for(None), executor)
        cluster.remove_node(node)
        poll_until(lambda: not actors(), executor)


def test_workers_share_cores_of_their_node(cluster: Cluster) -> None:
    import ray

    from eval_pipeline import ray_pool
    from tests.helpers.ray_cluster import NODE

    count = ray.remote(ray_pool._workers_on_this_node)
    node = cluster.add_node(**NODE, num_gpus=4)
    with ray_pool.connected(cluster.address):
        counts = [ray.get(count.options(num_gpus=gpus).remote(None, gpus)) for gpus in (1, 2)]
        counts += [ray.get(count.options(num_gpus=1).remote(num_workers, 1)) for num_workers in (3, 8)]
        counts += [ray.get(count.remote(num_workers, 0)) for num_workers in (None, 7)]
    cluster.remove_node(node)
    assert counts == [4, 2, 3, 4, 1, 3]  # three nodes, one with GPUs


def test_worker_that_cannot_judge_reports_error(cluster: Cluster) -> None:
    from eval_pipeline.config import SamplingConfig
    from eval_pipeline.ray_pool import RayPool
    from eval_pipeline.worker import Batch, BatchFailed, BatchId, Event

    recipe = recipe_for(cluster.address)
    setattr(recipe.judge, "isolation", "none")  # noqa: B010 - a level that no node has, which the type forbids
    batch = Batch(BatchId(claim=1, number=0), None, {}, (), SamplingConfig())
    with RayPool(recipe) as executor:
        poll_until(lambda: executor.has_room_for(None), executor)
        executor.submit(batch)
        failed: list[Event] = wait_until(lambda: executor.events(60))
    assert len(failed) == 1 and isinstance(failed[0], BatchFailed)
    assert failed[0].batch == batch.id and "isolation 'none' does not exist" in failed[0].error


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), NUM_PROBLEMS)


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The result on one machine."""
    return evaluated_locally(inputs, tmp_path_factory.mktemp("local") / "out", NUM_PROBLEMS)


def test_work_of_killed_node_is_repeated_on_another(
    inputs: Path, cluster: Cluster, undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    (node,) = cluster.worker_nodes
    (raylet,) = node.all_processes["raylet"]
    on_node: list[psutil.Process] = []

    def is_at_work() -> bool:
        """Whether answers have arrived and the node has a batch: its worker starts vLLM for the first one."""
        on_node[:] = family_of(psutil.Process(raylet.process.pid))
        return run.num_answers > 0 and count_of("vllm_process", on_node) > 0

    # of the two requested workers, the lost one is replaced on the remaining node
    with RayEvaluation(inputs, tmp_path / "out", cluster, "executor.num_workers=2") as run:
        run.wait_until(is_at_work)
        assert any(map(is_worker, on_node))
        cluster.remove_node(node, allow_graceful=False)  # SIGKILL
        assert run.num_answers < NUM_PROBLEMS
        printed = run.finish()
    assert result_in(run.output) == undisturbed
    assert len(run.warnings) == 1 and "died" in run.warnings[0]
    assert printed.startswith("Evaluated: model\n")  # and nothing that Ray prints
    assert [(job.state, job.attempts) for job in jobs(run.output)] == [("done", 0)]
    wait_gone(on_node)
