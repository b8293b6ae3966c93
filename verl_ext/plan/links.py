"""How long collectives take over the links of a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.plan.hardware import Hardware


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes.

    Attributes:
        hardware: of each rank.
        gpus: ranks.
        gpus_per_node: ranks that share a node.
    """

    hardware: Hardware
    gpus: int
    gpus_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.gpus // self.gpus_per_node)

    def collective_s(self, whole_bytes: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor that is `whole_bytes` as a whole.

        A ring moves (n - 1) / n of it through each rank (NCCL's doc/PERFORMANCE.md, "bus bandwidth"). Between nodes the
        same holds of whole nodes, each of which sends through the adapters of all its GPUs. The slower of the two
        counts; every hop of the ring costs a latency.
        """
        if self.gpus == 1 or not whole_bytes:
            return 0.0
        hardware, nodes = self.hardware, self.num_nodes
        inside = whole_bytes * (self.gpus - 1) / self.gpus / hardware.link
        between = whole_bytes * (nodes - 1) / nodes / (hardware.network * min(self.gpus, self.gpus_per_node))
        return max(inside, between) / hardware.link_share + (self.gpus - 1) * hardware.latency

    @property
    def slowest_link(self) -> str:
        """What a large collective waits for."""
        slow_network = self.hardware.network * self.gpus_per_node < self.hardware.link
        return "the network" if self.num_nodes > 1 and slow_network else "the links of a node"
