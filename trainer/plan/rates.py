"""The rates of a machine, and the time that one kernel or one collective takes on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainer.plan.kernels import Work

if TYPE_CHECKING:
    from trainer.plan.layout import Layout

Axis = Literal["shard", "replicate", "reshard", "outer", "copy", "context", "tensor", "expert", "world"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Collective(NamedTuple):
    """One kind of collective: the operation, the mesh axis, the number of participating ranks, and the size."""

    operation: Operation
    axis: Axis
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True)
class Rates:
    """Rates of a machine, measured or estimated from its data sheet."""

    matmul: dict[int, float]
    """FLOP/s of matmuls, by `Work.element_size`."""
    attention: dict[int, float]
    """FLOP/s of attention, by `Work.element_size`."""
    memory: float
    """Bytes read and written per second by memory-bound kernels."""
    optimizer: float
    """Bytes read and written per second by the fused optimizer."""
    kernel_s: float
    """Shortest time between the starts of two kernels on the device."""
    host_s: float
    """Host time to issue one operator."""
    host: float
    """Bytes per second between one device and host memory, in either direction."""
    link: float
    """Bytes per second into one rank from the other ranks of its node."""
    network: float
    """Bytes per second into one rank from other nodes."""
    link_latency_s: float
    network_latency_s: float
    ranks_per_node: int
    taken_by_collectives: float = 0.0
    """Fraction of the device that is unavailable to kernels while a collective runs."""
    orthogonalize: dict[int, float] = field(default_factory=dict)
    """FLOP/s of Muon's Newton-Schulz iterations, by `Work.element_size`; where missing, `matmul` is used."""

    def kernel(self, work: Work) -> float:
        """Return the time of one kernel in seconds, by the roofline model (Williams et al. 2009)."""
        rates = {"matmul": self.matmul, "grouped": self.matmul, "attention": self.attention}.get(work.kind)
        compute_s = 0.0
        if rates:
            size = min(work.element_size, 4)
            compute_s = work.flops / rates.get(size, rates[2])  # without a float8 rate, use the bfloat16 rate
        return max(compute_s, work.num_bytes / self.memory, self.kernel_s)

    def collective(self, operation: Operation, layout: Layout, axis: Axis, num_ranks: int, num_bytes: int) -> float:
        """Return the time in seconds of one collective over `num_ranks` ranks along an axis of the mesh.

        Ranks are numbered along `shard` first.  Traffic between nodes goes through each rank's own NIC.  A
        ring moves (n - 1) / n of the bytes through each rank; an all-reduce moves twice that.
        """
        apart = layout.num_ranks // num_ranks
        # Consecutive ranks of the outer axis are apart by the size of the groups inside it.
        inside = layout.shard // num_ranks if axis == "outer" else 1
        stride = {"replicate": apart, "copy": apart, "outer": inside, "context": layout.tensor}.get(axis, 1)
        per_node = max(1, min(num_ranks, self.ranks_per_node // stride))
        num_nodes = -(-num_ranks // per_node)
        rounds = 2 if operation == "all_reduce" else 1
        # In an all-to-all, ranks send different data, each through its own card.
        num_cards = 1 if operation == "all_to_all" else per_node
        link_s = num_bytes * (per_node - 1) / per_node / self.link if per_node > 1 else 0.0
        network_s = num_bytes * (num_nodes - 1) / num_nodes / (num_cards * self.network) if num_nodes > 1 else 0.0
        latency_s = self.link_latency_s * math.log2(max(2, per_node)) + self.network_latency_s * math.log2(num_nodes)
        return rounds * (max(link_s, network_s) + latency_s)
