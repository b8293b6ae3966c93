"""Where the ranks of a single machine meet: a store that no other machine can reach.

torchrun's own rendezvous keeps its state as a pickle in a store that listens on every interface, so that whoever can
connect to it can have code run here. On one machine there is nothing to agree on but the store's port.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "loopback"
ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """torchrun's part in it; the store lives as long as this.

    Args:
        run_id: names the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        with socket.create_server((ADDRESS, 0)) as listener:
            self._port = listener.getsockname()[1]
            # the store listens on every interface unless it is handed a socket; it closes that itself
            self._store = TCPStore(
                ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    @property
    def use_agent_store(self) -> bool:
        """See the base class; the ranks are clients of the store that is made here."""
        return True

    def get_backend(self) -> str:
        """See the base class."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class; this node is the only one."""
        own = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        """See the base class."""
        return False

    def set_closed(self) -> None:
        """See the base class; nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """See the base class."""
        return 0

    def get_run_id(self) -> str:
        """See the base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See the base class; the store ends with this object."""
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """What torchrun calls for `--rdzv-backend=loopback`."""
    return LoopbackRendezvous(parameters.run_id)


rendezvous_handler_registry.register(NAME, create)
