"""Computes the shape of the device mesh for a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.schema import RunConfig
from trainer.config.sections import MeshSection
from trainer.errors import setting_error


@dataclass(frozen=True)
class MeshShape:
    """The resolved mesh: `replicate` x `shard` ranks."""

    replicate: int
    shard: int

    @property
    def is_hybrid(self) -> bool:
        return self.replicate > 1

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def advice(self, local_world_size: int) -> str:
        """Return a warning if shard groups straddle node boundaries, else an empty string.

        Links within a node are many times faster than those between nodes.
        """
        if self.num_ranks == local_world_size or not (self.shard % local_world_size and local_world_size % self.shard):
            return ""
        return (
            f"mesh.shard={self.shard} does not divide evenly into nodes of {local_world_size} ranks: some shard "
            "groups span two nodes, and all wait for the slowest; mesh.shard=node shards within each node"
        )


def find_mesh_shape(mesh: MeshSection, world_size: int, local_world_size: int) -> MeshShape:
    """Return the mesh for `world_size` ranks.  Raises UserError if the settings do not fit that number."""
    replicate, shard = mesh.replicate, mesh.shard
    if shard == "node":
        if world_size % local_world_size:
            raise setting_error(
                "mesh.shard", "node", f"{world_size} ranks do not divide evenly into nodes of {local_world_size}", -1
            )
        shard = local_world_size
        replicate = -1 if replicate == 1 else replicate
    if not isinstance(shard, int):
        raise setting_error("mesh.shard", shard, "must be a whole number, -1, or node", -1)
    for key, size, other in (("mesh.replicate", replicate, shard), ("mesh.shard", shard, replicate)):
        if size == 0 or size < -1:
            legal = world_size // other if other > 0 and world_size % other == 0 else 1
            raise setting_error(key, size, "must be at least 1, or -1 for all remaining ranks", legal)
    if replicate == -1 and shard == -1:
        raise setting_error("mesh.replicate", -1, "only one axis can take all remaining ranks (mesh.shard=-1)", 1)
    if shard == -1:
        check_divides("mesh.replicate", replicate, world_size)
        shard = world_size // replicate
    elif replicate == -1:
        check_divides("mesh.shard", shard, world_size)
        replicate = world_size // shard
    if replicate * shard != world_size:
        key = "mesh.shard" if replicate == 1 or world_size % replicate == 0 else "mesh.replicate"
        value, other = (shard, replicate) if key == "mesh.shard" else (replicate, shard)
        legal = world_size // other if world_size % other == 0 else -1
        rule = f"mesh.replicate x mesh.shard = {replicate} x {shard} is not the number of ranks, {world_size}"
        raise setting_error(key, value, rule, legal)
    return MeshShape(replicate, shard)


def smallest_mesh(config: RunConfig) -> MeshShape:
    """Return the smallest mesh that satisfies a configuration, for when the number of ranks is unknown."""
    mesh, reshard = config.mesh, config.fsdp.reshard_after_forward
    asked = [*(reshard if isinstance(reshard, list) else [reshard]), mesh.context]
    sizes = [size for size in asked if isinstance(size, int)]
    shard = mesh.shard if isinstance(mesh.shard, int) and mesh.shard > 0 else math.lcm(*(max(1, n) for n in sizes))
    return MeshShape(max(1, mesh.replicate), shard)


def check_divides(key: str, value: int, world_size: int) -> None:
    """Raise UserError unless `value` divides the number of ranks."""
    if world_size % value:
        raise setting_error(key, value, f"must divide the number of ranks, {world_size}", divisor(value, world_size))


def divisor(value: int, total: int) -> int:
    """Return the divisor of `total` nearest to `value`."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))
