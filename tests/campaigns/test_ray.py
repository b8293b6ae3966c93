"""An evaluation of many problems on a stable Ray cluster, and one whose driver is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.processes import wait_gone
from tests.helpers.ray_cluster import (
    RayEvaluation,
    actors,
    cluster_of_two,
    count_of,
    evaluated_locally,
    make_inputs,
    result_in,
    worker_processes,
)

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NUM_PROBLEMS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of_two() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), NUM_PROBLEMS)


def test_cluster_gives_results_of_one_machine(inputs: Path, cluster: Cluster, tmp_path: Path) -> None:
    with RayEvaluation(inputs, tmp_path / "out", cluster) as run:
        run.wait_until(lambda: len(actors()) == 2)  # one on each node
        printed = run.finish()
    assert result_in(run.output) == evaluated_locally(inputs, tmp_path / "local", NUM_PROBLEMS)
    assert not run.warnings and printed.startswith("Evaluated: model\n")
    assert not actors()


def test_killed_driver_leaves_no_process_on_nodes(inputs: Path, cluster: Cluster, tmp_path: Path) -> None:
    with RayEvaluation(inputs, tmp_path / "out", cluster) as run:
        # the second worker may still be starting when the first has answered
        run.wait_until(lambda: run.num_answers and count_of("judge.server") == 2 and count_of("vllm_process") >= 1)
        workers = worker_processes()
    wait_gone(workers)
