"""The rendezvous of several nodes, with the handlers of all nodes in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousTimeoutError

from tests.helpers.processes import free_port, wait_until
from verl_ext.launch import rendezvous
from verl_ext.launch.outcome import Failure, NodeEndedError, Stopped
from verl_ext.launch.rendezvous import ADDRESS, ClusterRendezvous

T = TypeVar("T")


class Cluster:
    """Nodes that share a registry."""

    def __init__(self, num_nodes: int, threads: ThreadPoolExecutor) -> None:
        self._threads, self._port = threads, free_port()
        self.nodes = [self.new_node(node, num_nodes) for node in range(num_nodes)]

    def new_node(self, node: int, num_nodes: int) -> ClusterRendezvous:
        return ClusterRendezvous(node, num_nodes, ADDRESS, self._port)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        return self._threads.submit(function)

    def start(self, node: ClusterRendezvous) -> Future[RendezvousInfo]:
        return self.submit(node.next_rendezvous)

    def meet(self) -> list[int]:
        """Let all nodes join; returns the port of each node's store."""
        infos = [each.result() for each in [self.start(node) for node in self.nodes]]
        assert [(info.rank, info.world_size) for info in infos] == [(n, len(infos)) for n in range(len(infos))]
        infos[0].store.set("key", "value")
        assert {info.store.get("key") for info in infos} == {b"value"}
        return [info.bootstrap_store_info.master_port for info in infos]


NewCluster = Callable[[int], Cluster]


@pytest.fixture
def new_cluster() -> Iterator[NewCluster]:
    clusters: list[Cluster] = []

    def new(num_nodes: int) -> Cluster:
        clusters.append(Cluster(num_nodes, threads))
        return clusters[-1]

    with ThreadPoolExecutor() as threads:
        yield new
        for cluster in clusters:
            for node in reversed(cluster.nodes):
                node.shutdown()


@pytest.fixture(autouse=True)
def always_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_S", 0)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 1)


def test_failure_of_one_node_reaches_all_and_they_meet_again_at_new_store(new_cluster: NewCluster) -> None:
    cluster = new_cluster(3)
    first = cluster.meet()
    assert len(set(first)) == 1
    assert [node.num_nodes_waiting() for node in cluster.nodes] == [0, 0, 0]
    cluster.nodes[2].announce(Failure("rank 5 was killed by SIGKILL", exit_code=-9))
    cluster.nodes[0].announce(Failure("rank 0 lost its peer", exit_code=1))  # a consequence
    for node in cluster.nodes:
        with pytest.raises(NodeEndedError) as raised:
            node.num_nodes_waiting()
        assert raised.value.outcome == Failure("node 2: rank 5 was killed by SIGKILL", exit_code=-9)
    assert set(cluster.meet()).isdisjoint(first)
    assert [node.num_nodes_waiting() for node in cluster.nodes] == [0, 0, 0]


def test_stopped_node_stops_those_that_run_and_those_that_join(new_cluster: NewCluster) -> None:
    cluster = new_cluster(3)
    cluster.meet()
    cluster.nodes[0].announce(Failure("rank 0 crashed", exit_code=1))
    first = cluster.start(cluster.nodes[0])  # again, while the launcher of node 2 still pauses
    cluster.nodes[2].announce(Stopped(None, exit_code=131))
    expected = Stopped(None, exit_code=131, elsewhere="node 2 was stopped")
    with pytest.raises(NodeEndedError) as joining:
        first.result()
    with pytest.raises(NodeEndedError) as running:
        cluster.nodes[1].num_nodes_waiting()
    assert joining.value.outcome == running.value.outcome == expected


def test_first_node_ends_after_the_others_have_read_why(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2)
    cluster.meet()
    first, second = cluster.nodes
    announced = cluster.submit(lambda: first.announce(Stopped(None, exit_code=75)))
    with pytest.raises(NodeEndedError, match="^node 0 was stopped$"):
        wait_until(lambda: second.num_nodes_waiting() > 0)
    announced.result()
    assert first._missing_nodes("noticed") == []


def test_node_says_that_it_waits_for_the_first(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "ANNOUNCE_AFTER_S", 0.1)
    cluster = new_cluster(2)
    second = cluster.start(cluster.nodes[1])
    announced = ""

    def has_announced() -> bool:
        nonlocal announced
        announced += capsys.readouterr().out
        return (
            re.search(f"^Waiting for node 0 to start at {ADDRESS}:.* .Connection refused.$", announced, re.M)
            is not None
        )

    wait_until(has_announced)
    cluster.start(cluster.nodes[0]).result()
    second.result()


def test_waiting_nodes_follow_one_that_was_started_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(3)
    waiting = cluster.start(cluster.nodes[0])
    killed = cluster.nodes[1]
    killed._registry = killed._connect()
    killed._join()
    cluster.nodes[1] = cluster.new_node(1, 3)
    others = [cluster.start(node) for node in cluster.nodes[1:]]
    assert len({each.result().bootstrap_store_info.master_port for each in [waiting, *others]}) == 1


def test_node_names_those_it_waits_for(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "ANNOUNCE_AFTER_S", 0)
    cluster = new_cluster(4)
    waiting = [cluster.start(node) for node in (cluster.nodes[0], cluster.nodes[2])]
    announced = ""

    def has_announced() -> bool:
        nonlocal announced
        announced += capsys.readouterr().out
        return "Waiting for nodes 1, 3 to start\n" in announced

    wait_until(has_announced)
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 0)
    for each in waiting:
        with pytest.raises(RendezvousTimeoutError, match="^nodes 1, 3 did not join within 0 s$"):
            each.result()


def test_loss_of_a_node_ends_the_others_but_one_that_left_is_not_lost(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.01)
    cluster = new_cluster(3)
    cluster.meet()
    first, second, third = cluster.nodes
    second.shutdown()
    assert first._registry is not None and third._heartbeat is not None
    registry, key = first._registry, first._key("beats/2")
    monkeypatch.setattr(rendezvous, "LOST_AFTER_S", -1)

    for _ in range(3):  # by this limit, the third node is lost if a poll finds no new heartbeat
        before = registry.add(key, 0)
        wait_until(lambda before=before: registry.add(key, 0) > before)
        assert first.num_nodes_waiting() == 0
    third._heartbeat.stop()  # the machine is gone
    with pytest.raises(NodeEndedError, match="^node 2: no sign of life for -1 s$"):
        first.num_nodes_waiting()
        first.num_nodes_waiting()
    with pytest.raises(NodeEndedError, match="^node 2: no sign of life for -1 s$"):
        second.num_nodes_waiting()


def test_loss_of_first_node_ends_the_others_after_a_while(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(2)
    cluster.meet()
    first, second = cluster.nodes
    first._registry = first._store = None
    assert second.num_nodes_waiting() == 0  # at the end of a run, the first node may leave before the others
    assert second.num_nodes_waiting() == 0
    second.announce(Failure("its peer is gone", exit_code=1))  # nobody listens
    with monkeypatch.context() as patch, pytest.raises(NodeEndedError, match="^node 0 cannot be reached$"):
        patch.setattr(rendezvous, "REPLY_TIMEOUT_S", 0)
        second.num_nodes_waiting()
    assert len(set(cluster.meet())) == 1  # the first node is back
