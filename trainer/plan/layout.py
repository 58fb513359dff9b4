"""How a model's units are laid out on a mesh: what a plan needs of the configuration besides the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.config.parallel import MeshShape
from trainer.config.schema import RunConfig
from trainer.config.teacher import teacher_config
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.placement import Division, divide, num_dims_to_divide
from trainer.model.shard import is_unsharded, resolve_resharding
from trainer.plan.kernels import GroupAxis
from trainer.plan.muon import MuonUpdate
from trainer.plan.trace import ParameterInfo, Trace

_SIZES = {"float32": 4, "bfloat16": 2}
"""Bytes per element, by dtype."""


@dataclass(frozen=True)
class Teacher:
    """The teacher model in distillation.  It is frozen and runs only forward passes.

    num_bytes: memory per rank in bytes: its shards, and the output projection, which stays gathered for the loss.
    flops: FLOPs of the teacher's forward pass over one rank's micro-batch.
    """

    num_bytes: int
    flops: float


@dataclass(frozen=True)
class Layout:
    """The layout of the units on a mesh of `replicate` x `shard` ranks, with FSDP's settings for each unit.

    `reshard` has one entry per unit (the last is for the root): False, True, or the number of ranks to reshard to.
    """

    replicate: int
    shard: int
    reshard: tuple[bool | int, ...]
    param_size: int
    """Bytes per element of an unsharded parameter."""
    reduce_size: int
    """Bytes per element of a gradient when it is reduced."""
    cpu_offload: bool = False
    """Whether shards are in host memory, apart from the device's."""
    has_reference_model: bool = False
    """Whether there is a frozen copy of the model, sharded the same way."""
    teacher: Teacher | None = None
    """The teacher model in distillation; None without one."""
    has_average: bool = False
    """Whether there is an average of the trained weights (`train.ema`), sharded the same way."""
    prefetch_forward: int = 0
    """Number of units to gather ahead in the forward pass; 0 for FSDP's default."""
    prefetch_backward: int = 0
    """Number of units to gather ahead in the backward pass; 0 for FSDP's default."""
    accumulates_shards: bool = False
    """Whether gradients are reduced after each micro-batch (`fsdp.accumulate=sharded`)."""
    context: int = 1
    """Number of ranks in the shard axis that hold slices of the same sequences."""
    tensor: int = 1
    """Number of ranks in the shard axis that share each layer's matrices."""
    expert: int = 1
    """Number of ranks in the shard axis among which the experts are divided."""
    reshard_after_backward: bool = True
    """Whether every micro-batch gathers again; after the last one of a step, only shards remain in any case."""
    muon: tuple[MuonUpdate, ...] = ()
    """The updates of the matrices that Muon trains, one for each mesh on which there are some."""
    is_unsharded: bool = False
    """Whether each rank holds the full model as a plain module: nothing is gathered, and replicas average gradients in
    buckets."""
    divisions: Mapping[str, Division] = field(default_factory=dict)
    """How parameters are divided, by name; all others are divided along dimension 0."""

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def group_size(self, axis: GroupAxis) -> int:
        """Return the number of ranks in a group that communicates inside the forward pass."""
        return {"context": self.context, "tensor": self.tensor, "expert": self.expert}[axis]

    def split_axis(self, parameter: ParameterInfo) -> GroupAxis | None:
        """Return the axis of the groups that first divide a parameter; None if no group does."""
        if self.division(parameter).group == 1:
            return None
        return "expert" if parameter.is_expert else "tensor"

    def division(self, parameter: ParameterInfo) -> Division:
        """Return how a parameter is divided among the ranks of the shard axis."""
        return self.divisions.get(parameter.name) or Division(0, self.shard)


def layout_of(config: RunConfig, trace: Trace, mesh: MeshShape, attended_length: float, device_type: str) -> Layout:
    """Return the layout of the units of `trace` on `mesh`, according to `config`.

    attended_length: see `Probe.attended_length`.
    """
    fsdp = config.fsdp
    setting = fsdp.reshard_after_forward
    reshard = resolve_resharding(setting, [unit.name for unit in trace.units[: trace.root]], mesh.shard)
    divisions = {
        parameter.name: divide(
            parameter.shape,
            mesh.shard,
            *_group_of(parameter, config),
            num_dims_to_divide(parameter.shape, config, after_forward),
        )
        for unit, after_forward in zip(trace.units, (*reshard, True), strict=True)
        for parameter in unit.parameters
    }
    muon_parameters: dict[int, list[ParameterInfo]] = {}  # by the number of copies, which are on meshes of their own
    for parameter in (parameter for unit in trace.units for parameter in unit.parameters):
        if parameter.muon_blocks is not None and parameter.is_trained:
            muon_parameters.setdefault(divisions[parameter.name].copies, []).append(parameter)
    return Layout(
        mesh.replicate,
        mesh.shard,
        (*reshard, setting == "always"),
        param_size=_SIZES[fsdp.param_dtype],
        reduce_size=_SIZES[fsdp.reduce_dtype],
        cpu_offload=fsdp.cpu_offload and device_type != "cpu",
        has_reference_model=config.has_reference_model,
        teacher=teacher_of(config, mesh.shard, attended_length),
        context=config.context,
        tensor=config.tensor,
        expert=config.expert,
        has_average=config.train.ema > 0,
        prefetch_forward=fsdp.prefetch_forward,
        prefetch_backward=fsdp.prefetch_backward,
        accumulates_shards=fsdp.accumulate == "sharded",
        reshard_after_backward=fsdp.reshard_after_backward,
        is_unsharded=is_unsharded(config, mesh.shard),
        divisions=divisions,
        muon=tuple(
            MuonUpdate(parameters, divisions, mesh.replicate * copies, mesh.shard // copies, config.optim.muon)
            for copies, parameters in muon_parameters.items()
        ),
    )


def _group_of(parameter: ParameterInfo, config: RunConfig) -> tuple[int, int]:
    """Return the number of consecutive ranks that first divide a parameter, and the dimension that they divide."""
    if parameter.is_expert:
        return config.expert, 0
    if parameter.tensor_dim is not None:
        return config.tensor, parameter.tensor_dim
    return 1, 0


def teacher_of(config: RunConfig, num_shards: int, attended_length: float | None = None) -> Teacher | None:
    """Return a distillation teacher's memory and FLOPs on one rank, or None without a teacher.

    attended_length: the sequence length for which the FLOPs of attention are counted; `data.seq_len` by default.
    """
    teacher = teacher_config(config)
    if teacher is None:
        return None
    model = build_network(teacher)
    shard_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) // num_shards
    output_numel = max(p.numel() for p in model.parameters() if p.shape[:1] == (teacher.vocab_size,))
    tokens = int(config.train.micro_batch_size) * config.data.seq_len // config.ranks_per_sample
    flops = training_flops_per_token(teacher, model, attended_length or config.data.seq_len) / 3 * tokens
    return Teacher(shard_bytes + output_numel * _SIZES[config.fsdp.param_dtype], flops)
