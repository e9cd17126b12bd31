"""The ranks of a run, their device mesh and their process groups, under the ledger's names."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainledger.errors import BadInput
from trainledger.plans.ranks import groups_of, peers_of, place_of, world_size
from trainledger.runtime.spec import RunSpec


class World:
    """The default process group cut along every axis of a plan; needs an initialised process group.

    plan        the row of a Plans
    place       where this rank stands
    mesh        axes pp, dp_replicate, dp_shard (here dp_shard x cp: the ranks that divide dense states) and tp
    shard_mesh  what FSDP2 shards dense units over: dp_shard, with replicas (dp_replicate, dp_shard)
    tp_mesh     the axis tp
    rank_maps   the tensors that meshes keep, by what they are called in the ledger
    names       torch's name of each group to the ledger's
    """

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        plan = spec.plan
        if dist.get_world_size() != world_size(plan):
            raise BadInput(
                f"{dist.get_world_size()} ranks were started and the plan has {world_size(plan)}; start as many as the "
                "plan has, or change a degree"
            )
        self.device = device
        self.plan = plan
        self.place = place_of(plan, dist.get_rank())
        shape = (plan["pp"], plan["dp_replicate"], plan["dp_shard"] * plan["cp"], plan["tp"])
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        self._groups = self._made(tied=spec.model.tied)
        self.tp_mesh = self.mesh["tp"]
        experts = self.expert_mesh
        # private: meshes keep the ranks of the job as a tensor, which is all that a world holds
        self.rank_maps = {"device mesh": self.mesh._rank_map}
        if experts is not None:
            self.rank_maps["device mesh of experts"] = experts._rank_map
        self.shard_mesh = self.mesh["dp_replicate", "dp_shard"] if plan["dp_replicate"] > 1 else self.mesh["dp_shard"]
        self.names = {group.group_name: name for name, group in self._groups.items()} | self._data_names()

    def _made(self, *, tied: bool) -> dict[str, dist.ProcessGroup]:
        # The mesh takes the default group for an axis that spans the job, so the job has one of its own.
        groups = {"world": self._new("world")} if dist.get_world_size() > 1 else {}
        for axis, size in zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True):
            if size > 1:
                groups[axis] = self.mesh.get_group(axis)
        groups |= {name: self._new(name) for name in ("cp", "ep") if self.plan[name] > 1}
        if tied and self.plan["pp"] > 1:
            groups["embedding"] = self._new("embedding")
        return groups

    def _data_names(self) -> dict[str, str]:
        """At zero_stage 0 gradients are averaged over all replicas at once; experts have meshes of their own."""
        experts = self.expert_mesh
        if self.plan["zero_stage"] == 0:
            meshes = {"dp": self.replica_mesh}
            if experts is not None:
                meshes["expert_dp"] = self.expert_replica_mesh
        else:
            meshes = {}
            if experts is not None:
                meshes |= {axis: experts[axis] for axis in ("dp_replicate", "expert_dp_shard")}
        return {mesh.get_group(0).group_name: name for name, mesh in meshes.items() if mesh.size() > 1}

    def _new(self, name: str) -> dist.ProcessGroup:
        """The group of this rank among all of a name, where no axis of the mesh is that group; every rank makes all."""
        made = {ranks: dist.new_group(list(ranks), group_desc=name) for ranks in groups_of(self.plan, name)}
        own = made[peers_of(self.plan, name, self.place.rank)]
        assert isinstance(own, dist.ProcessGroup)
        return own

    @property
    def num_averaging(self) -> int:
        """Ranks over which dense gradients are averaged: dp x cp."""
        return self.plan["dp_replicate"] * self.plan["dp_shard"] * self.plan["cp"]

    def group(self, name: str) -> dist.ProcessGroup | None:
        """A group by the ledger's name; None where it has one rank."""
        return self._groups.get(name)

    @cached_property
    def replica_mesh(self) -> DeviceMesh:
        """One axis over all ranks that average dense gradients."""
        if self.plan["dp_replicate"] == 1:
            return self.mesh["dp_shard"]
        if self.mesh.size(2) == 1:
            return self.mesh["dp_replicate"]
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp")

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """(dp_replicate, expert_dp_shard) of this rank's experts; None without expert parallelism."""
        if self.plan["ep"] == 1:
            return None
        ep, tp = self.plan["ep"], self.plan["tp"]
        shape = (self.plan["pp"], self.plan["dp_replicate"], self.mesh.size(2) // ep, ep, tp)
        names = ("pp", "dp_replicate", "expert_dp_shard", "ep", "tp")
        ranks = torch.arange(world_size(self.plan)).view(shape)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=names)["dp_replicate", "expert_dp_shard"]

    @cached_property
    def expert_shard_mesh(self) -> DeviceMesh:
        """What FSDP2 shards routed experts over."""
        assert self.expert_mesh is not None
        return self.expert_mesh if self.plan["dp_replicate"] > 1 else self.expert_mesh["expert_dp_shard"]

    @cached_property
    def expert_replica_mesh(self) -> DeviceMesh:
        """One axis over all ranks that hold the same routed experts."""
        assert self.expert_mesh is not None
        if 1 in self.expert_mesh.shape:
            return self.expert_mesh["expert_dp_shard" if self.expert_mesh.size(0) == 1 else "dp_replicate"]
        return self.expert_mesh._flatten("expert_dp")


def device_here() -> torch.device:
    """The CUDA device of this process where its group talks through NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
