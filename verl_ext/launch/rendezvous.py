"""How the launchers of a run find each other: rendezvous handlers for torchrun, on one machine and on several.

Imports torch, so the launcher imports this module only when it starts the ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from verl_ext.console import print_line
from verl_ext.launch.outcome import Failure, NodeEndedError, Stopped

LOOPBACK, CLUSTER = "loopback", "cluster"
"""Names of the rendezvous for torchrun: for a single machine, and for several nodes."""
ADDRESS = "127.0.0.1"
JOIN_TIMEOUT_S = 900.0
"""How long a node waits for the others."""
ANNOUNCE_AFTER_S = 30.0
"""After this time a node says for which others it waits."""
WAIT_S = 0.2
POLL_S = 1.0
"""How often a node asks whether another one has failed."""
REPLY_TIMEOUT_S = 60.0
"""How long the first node may take to reply, or be unreachable, before it counts as lost."""
CONNECT_TIMEOUT_S = 5.0
"""How long one attempt to connect to the first node may take."""
BEAT_S = 10.0
"""Seconds between two heartbeats of a node."""
LOST_AFTER_S = 90.0
"""Without a heartbeat for this long, a node counts as lost."""
NOTICE_S = 5.0
"""How long the first node, which keeps the registry, waits for the others to read why it ends."""
STOPPED = "stopped"
"""Key of the registry that ends all generations."""


class SingleGroup(RendezvousHandler):
    """What both rendezvous share: the group of nodes is fixed, and the ranks use the store of the first node."""

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the store that `next_rendezvous` returns."""
        return True

    def get_run_id(self) -> str:
        return "run"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No further node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        """The store ends with this object."""
        return True


class LoopbackRendezvous(SingleGroup):
    """The rendezvous of a single machine: a store on 127.0.0.1 that lives as long as this object.

    torchrun's own rendezvous pickles its state into a store that listens on every interface, so anyone who can connect
    to it can execute code here. On a single machine, only the store's port has to be agreed on.
    """

    def __init__(self) -> None:
        with socket.create_server((ADDRESS, 0)) as listener:
            self._port = listener.getsockname()[1]
            # Without a socket the store would listen on every interface; it closes the socket itself.
            self._store = TCPStore(
                ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    def get_backend(self) -> str:
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """This node is the only one."""
        own = PrefixStore(self.get_run_id(), self._store)
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))


class ClusterRendezvous(SingleGroup):
    """The rendezvous of several nodes: every failure of a node starts a new generation of the whole group.

    The launcher of node 0 keeps a registry at MASTER_ADDR:MASTER_PORT for as long as it lives. Each node joins the
    current generation once. If it joins again, announces a failure, or sends no more heartbeats, the generation is
    over, and the other nodes end their ranks, which would otherwise wait for peers that have ended until a collective
    times out. Each generation has a store of its own, because a new rank must not read what an earlier one wrote. A
    stopped node ends the run on all nodes.

    Args:
        node: rank of this node.
        num_nodes: number of nodes.
        address: address of node 0.
        port: port of the registry.
    """

    def __init__(self, node: int, num_nodes: int, address: str, port: int) -> None:
        self._node, self._num_nodes, self._address, self._port = node, num_nodes, address, port
        self._registry: TCPStore | None = None
        self._generation = 0
        self._store: TCPStore | None = None
        self._waits_since = self._asked_at = time.monotonic()
        self._has_announced = False
        self._lost_at: float | None = None
        self._heartbeat: _Heartbeat | None = None
        self._last_beats: dict[int, tuple[int, float]] = {}  # by node: their number, and when it last changed

    def get_backend(self) -> str:
        return CLUSTER

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node has joined the same generation.

        Raises:
            NodeEndedError: a node was stopped.
            RendezvousTimeoutError: a node did not join within `JOIN_TIMEOUT_S`.
            DistError: node 0 was lost in the meantime.
        """
        self._has_announced = False
        self._registry, self._lost_at = self._connect(), None
        self._waits_since, self._has_announced = time.monotonic(), False
        self._join()
        while not (self._wait_for_all("joined") and self._wait_for_all("ready")):
            self._join()
        port = int(self._registry.get(self._key("port")))
        if self._store is None:
            self._store = TCPStore(self._address, port, is_master=False, timeout=timedelta(seconds=REPLY_TIMEOUT_S))
        self._last_beats = {}
        if self._node > 0:
            self._heartbeat = _Heartbeat(self._registry, self._key(f"beats/{self._node}"))
        return RendezvousInfo(self._store, self._node, self._num_nodes, RendezvousStoreInfo(self._address, port))

    def num_nodes_waiting(self) -> int:
        """Always 0; torchrun calls this method several times a second while the ranks run.

        Raises:
            NodeEndedError: the generation is over, or a node is lost.
        """
        now = time.monotonic()
        if now - self._asked_at < POLL_S:
            return 0
        self._asked_at = now
        if self._lost_at is not None:
            if now - self._lost_at > REPLY_TIMEOUT_S:
                raise NodeEndedError(Failure("node 0 cannot be reached", exit_code=1))
            return 0
        try:
            if self._node == 0:
                self._end_if_node_is_lost(now)
            reason = self._reason()
            if reason is not None:
                self._set_noticed()
        except DistError:  # perhaps the run is ending, and this node is the last
            self._lost_at = now
            return 0
        if reason is not None:
            raise NodeEndedError(reason)
        return 0

    def shutdown(self) -> bool:
        """End the heartbeats of this node, whose ranks have ended."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
            with suppress(DistError):  # node 0 has ended, too
                assert self._registry is not None
                self._registry.set(self._key(f"left/{self._node}"), "1")
        return True

    def announce(self, outcome: Failure | Stopped) -> None:
        """Tell the other nodes that the ranks of this node have failed, or that this node was stopped."""
        if self._registry is None or self._lost_at is not None:
            return
        try:
            if isinstance(outcome, Stopped):
                self._registry.compare_set(STOPPED, "", f"{outcome.exit_code} node {self._node} was stopped")
            else:
                self._end_generation(self._node, outcome)
            self._set_noticed()
            waits_until = time.monotonic() + (NOTICE_S if self._node == 0 else 0)
            while self._missing_nodes("noticed") and time.monotonic() < waits_until:
                time.sleep(WAIT_S)
        except DistError:  # node 0 has ended, too
            self._lost_at = time.monotonic()

    def _set_noticed(self) -> None:
        assert self._registry is not None
        self._registry.set(self._key(f"noticed/{self._node}"), "1")

    def _connect(self) -> TCPStore:
        if self._node == 0:
            return self._registry or TCPStore(self._address, self._port, is_master=True, wait_for_workers=False)
        self._wait_for_first_node()
        return TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=REPLY_TIMEOUT_S))

    def _wait_for_first_node(self) -> None:
        """Wait until the registry accepts connections; `TCPStore` would print a page of C++ frames if it has to wait.

        Raises:
            RendezvousTimeoutError: node 0 cannot be reached.
        """
        since = time.monotonic()
        while True:
            try:
                socket.create_connection((self._address, self._port), timeout=CONNECT_TIMEOUT_S).close()
            except OSError as error:
                waited_s, why = time.monotonic() - since, error.strerror or error
                if waited_s > JOIN_TIMEOUT_S:
                    raise RendezvousTimeoutError(f"node 0 at {self._address}:{self._port}: {why}") from error
                if waited_s > ANNOUNCE_AFTER_S and not self._has_announced:
                    self._has_announced = True
                    print_line(f"Waiting for node 0 to start at {self._address}:{self._port} ({why})")
                time.sleep(WAIT_S)
            else:
                return

    def _join(self) -> None:
        """Join the current generation, or a new one if this node has joined the current one before."""
        assert self._registry is not None
        while True:
            self._generation = self._registry.add("generation", 0)
            if self._registry.add(self._key(f"joined/{self._node}"), 1) == 1:
                break
            self._end_generation(self._node, Failure("it was started again", exit_code=1))
        self._store = None
        if self._node == 0:
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            self._registry.set(self._key("port"), str(self._store.port))

    def _wait_for_all(self, state: str) -> bool:
        """Wait until all nodes have reached a state; returns False if the generation is over.

        A node is ready when it has seen that all have joined. One that has died after it joined never is.

        Raises:
            NodeEndedError: a node was stopped.
        """
        assert self._registry is not None
        if state == "ready":
            self._registry.set(self._key(f"ready/{self._node}"), "1")
        while missing := self._missing_nodes(state):
            if (reason := self._reason()) is not None:
                if isinstance(reason, Stopped):
                    self._set_noticed()
                    raise NodeEndedError(reason)
                return False
            waited_s = time.monotonic() - self._waits_since
            if waited_s > JOIN_TIMEOUT_S:
                raise RendezvousTimeoutError(f"{_list_nodes(missing)} did not join within {JOIN_TIMEOUT_S:.0f} s")
            if waited_s > ANNOUNCE_AFTER_S and not self._has_announced:
                self._has_announced = True
                print_line(f"Waiting for {_list_nodes(missing)} to start")
            time.sleep(WAIT_S)
        return True

    def _missing_nodes(self, state: str) -> list[int]:
        """Nodes that have not reached a state in this node's generation."""
        assert self._registry is not None
        keys = {node: self._key(f"{state}/{node}") for node in range(self._num_nodes)}
        if self._registry.check([*keys.values()]):
            return []
        return [node for node, key in keys.items() if not self._registry.check([key])]

    def _end_if_node_is_lost(self, now: float) -> None:
        assert self._registry is not None
        for node in range(1, self._num_nodes):
            beats = self._registry.add(self._key(f"beats/{node}"), 0)
            last, since = self._last_beats.get(node, (None, now))
            if beats != last:
                self._last_beats[node] = beats, now
            elif now - since > LOST_AFTER_S and not self._registry.check([self._key(f"left/{node}")]):
                self._end_generation(node, Failure(f"no sign of life for {LOST_AFTER_S:.0f} s", exit_code=1))

    def _end_generation(self, node: int, failure: Failure) -> None:
        assert self._registry is not None
        reason = f"{failure.exit_code} node {node}: {failure.message}"
        self._registry.compare_set(self._key("reason"), "", reason)
        self._registry.compare_set("generation", str(self._generation), str(self._generation + 1))

    def _reason(self) -> Failure | Stopped | None:
        """The stop that ended the run, or the failure that ended this node's generation; None while it lasts."""
        assert self._registry is not None
        for key in (STOPPED, self._key("reason")):
            if self._registry.check([key]):
                code, message = self._registry.get(key).decode().split(" ", 1)
                return Stopped(None, int(code), message) if key == STOPPED else Failure(message, int(code))
        return None

    def _key(self, name: str) -> str:
        return f"{self._generation}/{name}"


class _Heartbeat:
    """Counts up a key of the registry, in a thread, until it is stopped or the registry cannot be reached.

    A connection of its own keeps it from delaying other requests.
    """

    def __init__(self, registry: TCPStore, key: str) -> None:
        self._registry, self._key = TCPStore(registry.host, registry.port, is_master=False), key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat of node", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(DistError):  # `num_nodes_waiting` notices that node 0 is lost
            while not self._ended.is_set():
                self._registry.add(self._key, 1)
                self._ended.wait(BEAT_S)


def _list_nodes(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


@cache
def cluster_rendezvous(num_nodes: int) -> ClusterRendezvous:
    """The rendezvous of this process, over all attempts; NODE_RANK, MASTER_ADDR and MASTER_PORT say where it is."""
    address, port = os.environ.get("MASTER_ADDR", ADDRESS), int(os.environ.get("MASTER_PORT", "29500"))
    return ClusterRendezvous(int(os.environ.get("NODE_RANK", "0")), num_nodes, address, port)


rendezvous_handler_registry.register(LOOPBACK, lambda _: LoopbackRendezvous())
rendezvous_handler_registry.register(CLUSTER, lambda parameters: cluster_rendezvous(parameters.max_nodes))
