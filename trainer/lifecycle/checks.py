"""Checks before the first step that compare the ranks: same settings and code, placement, replicas and samples.

They find errors that would otherwise go unnoticed: a parameter that FSDP does not manage is trained separately on each
rank, replicas that differ stay different, and samples that two ranks read count twice.

Not checked: custom loaders, which have no sample indices to compare; buffers, which may differ between ranks (a save
compares the ones that it stores); and models other than `Trainer.model`, such as a teacher or the average of the
weights.

The checks change no values, draw no random numbers, and work for any model.  Those of `probes.py` run the model.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
import platform
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.config.parallel import MeshShape, advice_on_shards
from trainer.config.requirements import check_requirements
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.data.loader import TrainLoader
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError, setting_error
from trainer.metrics.writers import warn
from trainer.model.gradients import replicas_of, reshard
from trainer.model.parameters import copied_from, is_shard, local_box, mesh_of, tied_names

DATA = "data"
"""The entry in `Trainer.exempt_from_selfcheck` that skips the check of the samples."""

_PER_RANK_KEYS = ("run.threads", "data.cache_dir", "data.num_workers")
"""Configuration keys that may differ between ranks, because they do not affect the results."""

_MAX_LINES = 10
"""Maximum number of problems that a message lists."""
_BLOCK_BYTES = 8 * 4096
"""Number of bytes in each partial sum of a checksum."""

# ---------------------------------------------------------------------------------------------------------------
# Settings and code


def check_same_run(channel: Channel, config: RunConfig, owner: type, exempt: Iterable[str] = ()) -> None:
    """Raise UserError on all ranks unless they have the same configuration and the same code.

    The code consists of this package with its recipes and objectives; the modules that define the model, the objective
    and `owner`; and the versions of torch and Python.  Call this before anything is built, because ranks with different
    meshes would wait for each other.  Also raises UserError if `owner` does not train for `train.objective`.  If the
    self-check is off on all ranks, differences are ignored.

    owner: the Trainer's class.
    exempt: patterns of configuration keys and source files that may differ.

    One small gather, and a second one if something differs.
    """
    objective, takes_objectives = config.train.objective, getattr(owner, "takes_objectives", False)
    if takes_objectives and config.objective.trainer is None:
        rule = f"{owner.__name__} trains for objectives other than predicting the next token"
        raise setting_error("train.objective", objective, rule, fix="use Trainer, or set train.objective")
    if config.objective.trainer is not None and not takes_objectives:
        rule = f"must be trained by {config.trainer_class(owner).__name__}, but this is {owner.__name__}"  # type: ignore[type-var]
        raise setting_error("train.objective", objective, rule, fix="use that class, or python -m trainer.run")
    exempt = tuple(exempt)
    facts = {name: fact for name, fact in _settings_and_code(config, owner) if not _matches(name, exempt)}
    # Gather even if the self-check is off on this rank: it may be on for other ranks.
    digests = channel.gather((_digest(facts), config.run.selfcheck))
    if len(set(digests)) > 1 and any(is_on for _, is_on in digests):
        lines = _describe_differences(channel.gather(facts))
        raise UserError(_message(["the ranks were started differently", *lines]))


def check_shape(world: World, config: RunConfig) -> MeshShape:
    """Return the mesh shape for this number of ranks.  Two small gathers.

    Raises UserError on all ranks if the settings do not match that number or need missing packages.  Warns if the shape
    is inefficient.
    """
    local_world_size = world.env.local_world_size
    shape = world.agreed(lambda: check_config(config, world.size, local_world_size))
    world.agreed(lambda: check_requirements(config, world.device.type))
    for advice in (shape.straddling_warning(local_world_size), advice_on_shards(config, shape)):
        if world.is_main and advice:
            warn(advice)
    return shape


def _settings_and_code(config: RunConfig, owner: type) -> Iterator[tuple[str, str]]:
    for section, values in config.to_dict().items():
        for name, value in values.items():
            if f"{section}.{name}" not in _PER_RANK_KEYS:
                yield f"{section}.{name}", json.dumps(value)
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    for name, path in sorted(_sources(config, owner).items()):
        yield name, f"checksum {zlib.crc32(path.read_bytes()):08x}"


def _sources(config: RunConfig, owner: type) -> dict[str, Path]:
    """Return the source files of this package, its recipes and the user's modules, by name."""
    files = {}
    for package in ("trainer", "trainer.recipes", "trainer.objectives"):
        for folder in map(Path, sys.modules[package].__path__ if package in sys.modules else ()):
            if (folder / "__init__.py").exists():  # skip the root of a checkout that is not installed
                for path in folder.rglob("*.py"):
                    files[f"{package}/{path.relative_to(folder)}"] = path
    build = config.spec.build
    modules = {cls.__module__ for cls in (*owner.__mro__, *type(config.model).__mro__, *type(config.objective).__mro__)}
    modules.add(build.partition(":")[0] if isinstance(build, str) else getattr(build, "__module__", ""))
    known_files = set(files.values())
    for module in modules:
        file = getattr(sys.modules.get(module), "__file__", None) or _file_of(module)
        if file and file.endswith(".py") and Path(file) not in known_files:
            files[module] = Path(file)
    return files


def _file_of(module: str) -> str | None:
    """Return the file of a module that has not been imported yet."""
    if module in sys.modules or not module:
        return None  # a built-in, or defined interactively
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # reported when the model is built
        return None
    return spec.origin if spec is not None else None


# ---------------------------------------------------------------------------------------------------------------
# Parameters and samples


@dataclass(frozen=True)
class _Part:
    """What this rank holds of one parameter."""

    name: str
    fact: str
    """Type, shape and placement, which must be the same on all ranks."""
    tensor: torch.Tensor
    mesh: DeviceMesh | None
    """The mesh whose ranks hold the parameter; None if all ranks hold all of it."""
    num_copies: int
    """Number of ranks that hold this same part."""


@dataclass(frozen=True)
class _Report:
    """One rank's report to the others, which is small for any model."""

    problems: list[str]
    digest: int
    """Digest of the facts that must be the same on all ranks."""
    checksums: list[int]
    """One per parameter."""
    order: tuple[int, int, int, str] | None
    """Position in the data, number of samples, seed, and a digest of the data; None if data is not checked."""
    samples: NDArray[np.int64] | None
    """Indices of the samples that this rank reads for the next step."""


def check_start(
    channel: Channel,
    model: nn.Module,
    mesh: DeviceMesh,
    ties: Sequence[Sequence[str]],
    loader: object,
    exempt: Iterable[str] = (),
) -> None:
    """Check parameters and data; if any rank finds problems, raise TrainingFailed with all of them on every rank.

    Every trainable parameter must be sharded over the last axis of `mesh` and replicated over the one before, or be
    unsharded with its gradient averaged (`trainer.model.gradients`).  Some are on a mesh of their own: one in which
    that last axis is split in two (`record_split_mesh`), and must be sharded over both, or one of copies and parts
    (`record_copies`), and must be sharded over the parts.  All ranks must have the same meshes, and the same placement
    of each parameter; if every rank also holds the shape that follows from these, the shards cover the parameter
    without overlap.  Replicas, copies, and frozen unsharded parameters, must be bitwise equal.  The samples that the
    ranks read for the next step must be the global batch: each sample once, in order, or once per rank that holds a
    slice of it.

    ties: groups of names, which must still be the same parameter.
    exempt: patterns of parameter names to skip, and `DATA`.

    Reads each replicated parameter once.  A small gather, and one of 8 bytes per parameter and sample; a third one if
    placements differ.
    """
    exempt = tuple(exempt)
    replicas = replicas_of(model)
    reshard(model)  # a custom forward pass may leave units unsharded
    parts: list[_Part] = []
    facts: dict[str, str] = {}

    def inspect_rank() -> _Report:
        problems = [*_describe_untied(model, ties, exempt)]
        for name, parameter in model.named_parameters():
            if not _matches(name, exempt):
                is_reduced = channel.size == 1 or (replicas is not None and replicas.averages(parameter))
                problem, part = _inspect(name, parameter, mesh, channel.size, is_reduced)
                problems += [problem] if problem else []
                parts.extend([part] if part else [])
        meshes = {mesh, *(part.mesh for part in parts if part.mesh is not None)}
        facts.update({f"mesh {_describe_axes(each)}": f"of ranks {each.mesh.tolist()}" for each in meshes})
        facts.update({part.name: part.fact for part in parts})
        checked_loader = loader if isinstance(loader, TrainLoader) and not _matches(DATA, exempt) else None
        return _Report(
            problems,
            _digest(facts),
            [_checksum(part) for part in parts],
            checked_loader.order if checked_loader is not None else None,
            checked_loader.next_samples() if checked_loader is not None else None,
        )

    reports: list[_Report] = channel.gather(channel.agreed(inspect_rank))
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for problem in report.problems:
            ranks_by_problem.setdefault(problem, []).append(rank)
    lines = [f"{_list_ranks(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items()]
    if len({report.digest for report in reports}) > 1:
        lines += _describe_differences(channel.gather(facts))
    else:
        lines += _compare_replicas(parts, np.array([report.checksums for report in reports]))
    lines += _compare_data(reports, loader)
    if lines:
        raise TrainingFailed(_message(lines))


def _describe_untied(model: nn.Module, ties: Sequence[Sequence[str]], exempt: Sequence[str]) -> Iterator[str]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied_groups = [set(group) for group in tied_names(model)]
    for first, *aliases in ties:
        group_of_first: set[str] = next((group for group in tied_groups if first in group), set())
        for alias in aliases:
            # A missing name was removed on purpose.
            if {first, alias} <= names and alias not in group_of_first and not _matches(alias, exempt):
                yield f"{alias} is a separate parameter; expected: tied to {first}, as the model was built"


def _inspect(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, world_size: int, is_reduced: bool
) -> tuple[str, _Part | None]:
    """Return the problem with a parameter (empty if none), and this rank's part of it if there is one to compare.

    is_reduced: whether the parameter's gradient needs no FSDP, because it is averaged elsewhere or there is one rank.
    """
    is_trainable = parameter.requires_grad
    fact = f"{parameter.dtype} {tuple(parameter.shape)}, {'trainable' if is_trainable else 'frozen'}"
    if parameter.is_meta:
        return f"{name} is on the meta device; expected: filled with values", None
    if not isinstance(parameter, DTensor):
        if is_trainable and not is_reduced:
            return f"{name} is not sharded, so its gradient is not reduced; {_expected_placement(mesh)}", None
        return "", _Part(name, f"{fact}, whole", parameter, None, world_size)
    own_mesh = parameter.device_mesh
    is_copied = copied_from(parameter) == mesh
    num_replicated = 1 if is_copied else mesh.ndim - 1
    outer, inner = parameter.placements[:num_replicated], parameter.placements[num_replicated:]
    is_sharded = all(is_shard(placement) for placement in inner)
    is_on_mesh = is_copied or mesh_of(parameter) == mesh
    if not is_on_mesh or not is_sharded or not all(placement.is_replicate() for placement in outer):
        placed = f"placed {parameter.placements} on {_describe_axes(own_mesh)}"
        # A frozen parameter may have any placement.
        return (f"{name} is {placed}; {_expected_placement(mesh)}" if is_trainable else ""), None
    box = local_box(parameter)
    assert box is not None
    num_copies = math.prod(own_mesh.shape[:num_replicated])
    fact = f"{fact}, placed {parameter.placements} on {own_mesh.mesh_dim_names}"
    part = _Part(name, fact, parameter.to_local(), own_mesh, num_copies)
    actual_shape, expected_shape = tuple(part.tensor.shape), tuple(stop - start for start, stop in box)
    if actual_shape != expected_shape:
        return f"{name} has shape {actual_shape} here; expected: {expected_shape} of {tuple(parameter.shape)}", part
    return "", part


def _expected_placement(mesh: DeviceMesh) -> str:
    return f"expected: a DTensor sharded over the last axis of {_describe_axes(mesh)}"


def _describe_axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


@torch.no_grad()
def _checksum(part: _Part) -> int:
    """Return a checksum of a part that several ranks hold; 0 for other parts, and for tensor subclasses.

    The device sums blocks of 64-bit words at memory speed, and the host computes a CRC-32 of the sums.  This detects
    any single changed word, and blocks in the wrong order.
    """
    tensor = part.tensor.detach()
    if part.num_copies == 1 or tensor.numel() == 0 or type(tensor) is not torch.Tensor:
        return 0
    data = tensor.contiguous().view(-1).view(torch.uint8)
    blocks = F.pad(data, (0, -len(data) % _BLOCK_BYTES)).view(torch.int64).view(-1, _BLOCK_BYTES // 8)
    return zlib.crc32(blocks.sum(dim=1).cpu().numpy().tobytes())


def _compare_replicas(parts: Sequence[_Part], checksums: NDArray[np.int64]) -> Iterator[str]:
    """Yield a line for each replica that differs.  checksums: (ranks, parameters)."""
    holders_in: dict[DeviceMesh | None, list[list[int]]] = {}  # the ranks that hold the same part, by mesh
    for part, checksum_of_rank in zip(parts, checksums.T, strict=True):
        if part.num_copies == 1:
            continue
        if part.mesh not in holders_in:
            ranks = torch.arange(len(checksum_of_rank)) if part.mesh is None else part.mesh.mesh
            holders_in[part.mesh] = ranks.reshape(part.num_copies, -1).T.tolist()
        for holders in holders_in[part.mesh]:
            found = [checksum_of_rank[rank] for rank in holders]
            expected = max(found, key=found.count)  # the majority; of two replicas, the first one
            reference_rank = holders[found.index(expected)]
            for rank, checksum in zip(holders, found, strict=True):
                if checksum != expected:
                    yield f"rank {rank}: {part.name} differs from its replica on rank {reference_rank}"


def _compare_data(reports: Sequence[_Report], loader: object) -> Iterator[str]:
    mismatched = [rank for rank, report in enumerate(reports) if report.order != reports[0].order]
    orders = [_describe_order(report.order) for report in reports]
    for rank in mismatched:
        yield f"rank {rank}: reads {orders[rank]}; rank 0 reads {orders[0]}"
    if mismatched or reports[0].order is None or not isinstance(loader, TrainLoader):
        return
    expected, first = loader.next_samples(all_ranks=True), 0
    num_sharing = 1 if loader.slices is None else loader.slices.num_ranks
    reader: dict[int, int] = {}
    for rank, report in enumerate(reports):
        actual = report.samples if report.samples is not None else np.empty(0, dtype=np.int64)
        expected_part = expected[first : first + actual.size]
        if (rank + 1) % num_sharing == 0:  # the last rank with slices of these samples
            first += actual.size
        if not np.array_equal(actual, expected_part):
            others = sorted({reader[sample] for sample in actual.tolist() if sample in reader})
            overlap = f", which overlap with those of {_list_ranks(others)}" if others else ""
            reads = f"reads samples {_shorten(actual)} for the next step{overlap}"
            yield f"rank {rank}: {reads}; expected: {_shorten(expected_part)}"
        reader = dict.fromkeys(actual.tolist(), rank) | reader
    if first != expected.size:
        yield f"all ranks: read {first} samples for the next step; expected: {expected.size}"


def _describe_order(order: tuple[int, int, int, str] | None) -> str:
    if order is None:
        return "data in an unknown order"
    position, num_samples, seed, content = order
    data = f", content {content}" if content else ""
    return f"from position {position} of an order of {num_samples} samples with seed {seed}{data}"


def _shorten(samples: NDArray[np.int64]) -> str:
    start = ", ".join(map(str, samples[:4].tolist()))
    return f"[{start}{', ...' if samples.size > 4 else ''}]"


# ---------------------------------------------------------------------------------------------------------------
# Messages


def _message(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    advice = "to exclude something, override Trainer.exempt_from_selfcheck; to skip the check: run.selfcheck=false"
    return "self-check: " + "\n  ".join([*lines[:_MAX_LINES], *more, advice])


def _digest(facts: Mapping[str, str]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _describe_differences(facts_by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each fact that is not the same on all ranks: which ranks have which value."""
    lines = []
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            lines.append(f"{name}: {'; '.join(f'{fact} on {_list_ranks(holders)}' for fact, holders in ranks.items())}")
    return lines


def _list_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
