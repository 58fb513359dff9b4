"""The self-check, which verifies across all ranks, before the first step, that the run is set up as configured.

It finds errors that would otherwise go unnoticed: a parameter that FSDP does not manage is trained separately on each
rank, replicas that differ stay different, and samples that two ranks read count twice.

Not checked: custom loaders, which have no sample indices to compare; buffers, which may differ between ranks (a save
compares the ones that it stores); and models other than `Trainer.model`, such as a teacher or the average of the
weights.

The check changes no values, draws no random numbers, and works for any recipe.  Further checks run the model itself:
`check_context` here (context parallelism must not change the loss), `check_experts` and `check_documents`.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.config import MeshShape, RunConfig, Slices, advice_on_shards, check_config
from trainer.config.rules import check_requirements
from trainer.data.loader import Batch, TrainLoader
from trainer.distributed.channel import Channel
from trainer.distributed.world import World
from trainer.errors import TrainingFailed, UserError, setting_error
from trainer.loss import IGNORE, find_loss
from trainer.metrics.writers import warn
from trainer.model.gradients import evaluation_mode, replicas_of, reshard
from trainer.model.parameters import local_box, mesh_of, tied_names
from trainer.sequence import current_slices, use_slices

DATA = "data"
"""The entry in `Trainer.exempt_from_selfcheck` that skips the check of the samples."""

_PER_RANK_KEYS = ("run.threads", "data.cache_dir", "data.num_workers")
"""Configuration keys that may differ between ranks, because they do not affect the results."""

_MAX_LINES = 10
"""Maximum number of problems that a message lists."""
_WORDS_PER_SUM = 4096
"""Number of 8-byte words in each partial sum of a checksum."""

# ---------------------------------------------------------------------------------------------------------------
# Comparing configuration and code


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
    facts = {name: fact for name, fact in _facts(config, owner) if not _matches(name, exempt)}
    digest = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    # Gather even if the self-check is off on this rank: it may be on for other ranks.
    digests = channel.gather((digest, config.run.selfcheck))
    if len(set(digests)) == 1 or not any(is_on for _, is_on in digests):
        return
    facts_by_rank: list[Mapping[str, str]] = channel.gather(facts)
    names = list(dict.fromkeys(name for facts in facts_by_rank for name in facts))
    lines = [
        f"{name}: {_describe_ranks_by_value(values)}"
        for name in names
        if len(set(values := [facts.get(name, "none") for facts in facts_by_rank])) > 1
    ]
    raise UserError(_message("the ranks were started differently", lines))


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


def _facts(config: RunConfig, owner: type) -> Iterator[tuple[str, str]]:
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
    build = config.recipe.build
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


def _describe_ranks_by_value(values: Sequence[str]) -> str:
    """Describe which ranks hold which value.  values: one per rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_list_ranks(holders)}" for value, holders in ranks.items())


def _list_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


# ---------------------------------------------------------------------------------------------------------------
# Comparing model and data


@dataclass(frozen=True)
class _Piece:
    """This rank's piece of one parameter."""

    name: str
    facts: str
    """Properties that must be the same on all ranks."""
    tensor: torch.Tensor
    spans: tuple[tuple[int, int], tuple[int, int]]
    """The [start, stop) along dimension 0 and along the other sharded dimension; (0, 1) if there is no other."""
    totals: tuple[int, int]
    """The parameter's size along these two dimensions; 1 if there is no other."""
    copies: int
    """Number of ranks that should hold this same piece."""


@dataclass(frozen=True)
class _Report:
    """One rank's report to the others, which is small for any model."""

    problems: list[str]
    digest: int
    """Digest of the parameter properties that must be the same on all ranks."""
    pieces: NDArray[np.int64]
    """One row per parameter: start and stop along both dimensions, and a checksum."""
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
    meshes: Mapping[str, DeviceMesh] | None = None,
) -> None:
    """Check parameters and data; if any rank finds problems, raise TrainingFailed with all of them on every rank.

    Every trainable parameter must be sharded over the last axis of `mesh` and replicated over the one before, or be
    unsharded with its gradient averaged (`trainer.model.gradients`).  Parameters in `meshes` must be sharded over the
    last two axes of their own mesh.  The shards must cover the parameter without overlap.  Replicas, and frozen
    unsharded parameters, must be bitwise equal.  The samples that the ranks read for the next step must be the global
    batch: each sample once, in order, or once per rank that holds a slice of it.

    ties: groups of names, which must still be the same parameter.
    exempt: patterns of parameter names to skip, and `DATA`.
    meshes: the meshes of expert parameters, by name.

    Reads each replicated parameter once.  A small gather, and one of 40 bytes per parameter and 8 per sample; a third
    one if properties of the parameters differ.
    """
    exempt = tuple(exempt)
    replicas = replicas_of(model)
    reshard(model)  # a custom forward pass may leave units unsharded
    pieces: list[_Piece] = []

    def inspect_rank() -> _Report:
        problems = list(_describe_untied(model, ties, exempt))
        for name, parameter in model.named_parameters():
            if not _matches(name, exempt):
                is_reduced = channel.size == 1 or (replicas is not None and replicas.averages(parameter))
                own_mesh = (meshes or {}).get(name)
                problem, piece = _inspect(
                    name, parameter, own_mesh or mesh, own_mesh is not None, channel.size, is_reduced
                )
                problems += [problem] if problem else []
                pieces.extend([piece] if piece else [])
        checked_loader = loader if isinstance(loader, TrainLoader) and not _matches(DATA, exempt) else None
        table = [(*piece.spans[0], *piece.spans[1], _checksum(piece)) for piece in pieces]
        return _Report(
            problems,
            zlib.crc32("\n".join(f"{piece.name}: {piece.facts}" for piece in pieces).encode()),
            np.array(table, dtype=np.int64).reshape(-1, 5),
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
        parameters: list[dict[str, str]] = channel.gather({piece.name: piece.facts for piece in pieces})
        for name in dict.fromkeys(name for facts in parameters for name in facts):
            values = [facts.get(name, "missing") for facts in parameters]
            if len(set(values)) > 1:
                lines.append(f"{name} is {_describe_ranks_by_value(values)}; expected: the same on all")
    else:
        lines += _compare_pieces(pieces, np.stack([report.pieces for report in reports]))
    lines += _compare_data(reports, loader)
    if lines:
        raise TrainingFailed(_message("", lines))


def _message(headline: str, lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    advice = "to exclude something, override Trainer.exempt_from_selfcheck; to skip the check: run.selfcheck=false"
    parts = [*([headline] if headline else []), *lines[:_MAX_LINES], *more, advice]
    return "self-check: " + "\n  ".join(parts)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, is_expert: bool, world_size: int, is_reduced: bool
) -> tuple[str, _Piece | None]:
    """Return the problem with a parameter (empty if none), and this rank's piece of it if there is one to compare.

    is_expert: whether the last axis of `mesh` divides experts among ranks, so that two axes shard the parameter.  Two
    axes also shard a stack whose matrices are split by rows (`trainer.model.row_shards`), on a separate mesh.
    is_reduced: whether the parameter's gradient needs no FSDP, because it is averaged elsewhere or there is one rank.
    """
    shape, is_trainable = tuple(parameter.shape), parameter.requires_grad
    facts = f"{parameter.dtype} {shape}, {'trainable' if is_trainable else 'frozen'}"
    if parameter.is_meta:
        return f"{name} is on the meta device; expected: filled with values", None
    if not isinstance(parameter, DTensor):
        if is_trainable and not is_reduced:
            expected = _expected_placement(mesh, is_expert)
            return f"{name} is not sharded, so its gradient is not reduced; expected: {expected}", None
        return "", _Piece(name, f"{facts}, whole", parameter, ((0, 1), (0, 1)), (1, 1), world_size)
    is_row_sharded = not is_expert and parameter.device_mesh != mesh and mesh_of(parameter) == mesh
    if is_row_sharded:
        mesh = parameter.device_mesh
    num_split = 2 if is_expert or is_row_sharded else 1
    outer = parameter.placements[:-num_split]
    split: tuple[Any, ...] = parameter.placements[-num_split:]
    if is_row_sharded:
        is_split = split == (Shard(0), Shard(1))
    else:
        is_split = all(type(placed).__name__ in _SHARDS[is_expert] for placed in split)
        is_split = is_split and (not is_expert or split[-1] == Shard(0))
    box = local_box(parameter)
    is_as_expected = is_split and all(placed == Replicate() for placed in outer)
    if parameter.device_mesh != mesh or not is_as_expected or box is None:
        if not is_trainable:
            return "", None  # a frozen parameter may have any placement
        placed = f"{tuple(parameter.placements)} on {_describe_axes(parameter.device_mesh)}"
        return f"{name} is placed {placed}; expected: {_expected_placement(mesh, is_expert, is_row_sharded)}", None
    local, dims = parameter.to_local(), sorted({placed.dim for placed in split})
    dim = dims[-1]  # a second one is dimension 0
    copies = mesh.size() // math.prod(mesh.shape[-num_split:])
    facts = f"{facts}, sharded on dim {' and '.join(map(str, dims))} over {_describe_axes(mesh)}"
    inner = (box[dim], shape[dim]) if dim else ((0, 1), 1)
    piece = _Piece(name, facts, local, (box[0], inner[0]), (shape[0], inner[1]), copies)
    local_shape = tuple(stop - start for start, stop in box)
    if tuple(local.shape) != local_shape:
        return f"{name} has shape {tuple(local.shape)} here; expected: {local_shape} of {shape}", piece
    return "", piece


_SHARDS = {False: ("Shard",), True: ("Shard", "_StridedShard")}
"""Names of the placements that shard a parameter, by whether it belongs to experts.  Experts are divided among ranks
first; FSDP then shards their parameters again, with strides."""


def _expected_placement(mesh: DeviceMesh, is_expert: bool, is_row_sharded: bool = False) -> str:
    split = [Shard(0), Shard(1)] if is_row_sharded else [Shard(0)] * (2 if is_expert else 1)
    placements = (*[Replicate()] * (mesh.ndim - len(split)), *split)
    return f"a DTensor placed {placements} on {_describe_axes(mesh)}"


def _describe_axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


@torch.no_grad()
def _checksum(piece: _Piece) -> int:
    """Return a checksum of a piece that several ranks hold; 0 for other pieces, and for tensor subclasses.

    The device sums blocks of 64-bit words at memory speed, and the host computes a CRC-32 of the sums.  This detects
    any single changed word, and blocks in the wrong order.
    """
    tensor = piece.tensor.detach()
    if piece.copies == 1 or tensor.numel() == 0 or is_traceable_wrapper_subclass(tensor):
        return 0
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    num_words = data.numel() // 8
    words, rest = data[: 8 * num_words].view(torch.int64), data[8 * num_words :]
    num_blocks = num_words // _WORDS_PER_SUM
    sums = (
        words[: num_blocks * _WORDS_PER_SUM].view(-1, _WORDS_PER_SUM).sum(dim=1),
        words[num_blocks * _WORDS_PER_SUM :],
        rest.to(torch.int64),
    )
    return zlib.crc32(torch.cat(sums).cpu().numpy().tobytes())


def _compare_pieces(pieces: Sequence[_Piece], tables: NDArray[np.int64]) -> Iterator[str]:
    """Yield inconsistencies between ranks.  tables: (ranks, parameters, 5), as in `_Report.pieces`."""
    for number, piece in enumerate(pieces):
        rows: dict[tuple[int, int], list[int]] = {}
        for rank, (start, stop, other_start, other_stop) in enumerate(tables[:, number, :4].tolist()):
            if start < stop and other_start < other_stop:
                rows.setdefault((start, stop), []).append(rank)
        yield from _tiling_errors(piece.name, "row", "", rows, piece.totals[0])
        for (start, stop), ranks in sorted(rows.items()):
            columns: dict[tuple[int, int], list[int]] = {}
            for rank in ranks:
                columns.setdefault(tuple(tables[rank, number, 2:4].tolist()), []).append(rank)
            if piece.totals[1] > 1:
                of_rows = f" of rows {start} to {stop - 1}"
                yield from _tiling_errors(piece.name, "column", of_rows, columns, piece.totals[1])
            for holders in columns.values():
                yield from _compare_copies(piece, (start, stop), holders, tables[holders, number, 4].tolist())


def _tiling_errors(
    name: str, unit: str, where: str, holders: Mapping[tuple[int, int], Sequence[int]], total: int
) -> Iterator[str]:
    """Yield a line for each place where spans do not tile [0, total).  holders: the ranks that hold each span."""
    end = 0
    for (start, stop), ranks in sorted(holders.items()):
        if start != end:
            wrong = "overlap" if start < end else "leave a gap"
            yield (
                f"{_list_ranks(ranks)}: the pieces of {name} {wrong}: {unit}s {start} to {stop - 1}{where} here; "
                f"expected: from {unit} {end} on"
            )
        end = max(end, stop)
    if end != total:
        yield f"all ranks: the pieces of {name} end at {unit} {end}{where}; expected: {total}"


def _compare_copies(
    piece: _Piece, rows: tuple[int, int], ranks: Sequence[int], checksums: Sequence[int]
) -> Iterator[str]:
    if len(ranks) != piece.copies:
        yield (
            f"{_list_ranks(ranks)}: rows {rows[0]} to {rows[1] - 1} of {piece.name} are on {len(ranks)} ranks; "
            f"expected: {piece.copies}"
        )
    expected = max(checksums, key=checksums.count)  # the majority; of two replicas, the first one
    for rank, checksum in zip(ranks, checksums, strict=True):
        if checksum != expected:
            reference_rank = ranks[checksums.index(expected)]
            yield f"rank {rank}: {piece.name} differs from its replica on rank {reference_rank}"


def _compare_data(reports: Sequence[_Report], loader: object) -> Iterator[str]:
    mismatched = [rank for rank, report in enumerate(reports) if report.order != reports[0].order]
    orders = [_describe_order(report.order) for report in reports]
    for rank in mismatched:
        yield f"rank {rank}: reads {orders[rank]}; rank 0 reads {orders[0]}"
    if mismatched or reports[0].order is None or not isinstance(loader, TrainLoader):
        return
    expected, first = loader.next_samples(all_ranks=True), 0
    num_sharing = 1 if loader.slices is None else loader.slices.count
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
# Context parallelism: the loss must be the same on slices and on complete sequences


_MAX_SLICE_TOKENS = 32
"""Maximum number of tokens per slice in the test input."""

_LOSS_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}
"""Relative tolerance of the loss, by dtype, which allows for a different order of summation.  It must be tight: with
fresh weights, attention is so weak that even restarting positions in each slice changes the loss by at most 2e-6."""


def check_context(world: World, model: nn.Module, loader: object, config: RunConfig) -> None:
    """Raise UserError on all ranks if the model's loss on slices differs from that on complete sequences.

    A model that mixes or counts tokens outside `trainer.sequence` computes a wrong loss on slices of sequences, and
    this does not show in its loss curve.  The check runs the model itself and works for any recipe.

    The test input is the start of this rank's next sample; no gradients are computed.  A no-op without context
    parallelism, or with a custom loader.  Collectives: two forward passes, and a gather of two numbers.
    """
    slices = current_slices()
    if slices is None or not isinstance(loader, TrainLoader):
        return
    slices = replace(slices, seq_len=min(slices.seq_len, _MAX_SLICE_TOKENS * slices.count))
    full_batch, slice_batch = world.agreed(lambda: _batches(loader, slices))
    loss_of = find_loss(model)
    # Eager, because compiling for these sizes would not help the run, which has other sizes.
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        with use_slices(None):
            expected = float(loss_of(_to_device(full_batch, world)))
        with use_slices(slices):
            actual = float(loss_of(_to_device(slice_batch, world)))
    tolerance = _LOSS_TOLERANCE[config.fsdp.param_dtype]
    for rank, (full_loss, slice_loss) in enumerate(world.gather((expected, actual))):
        if not abs(full_loss - slice_loss) <= tolerance * abs(full_loss):
            rule = (
                f"recipe {config.recipe.name!r} mixes or counts tokens outside trainer.sequence: the loss of "
                f"rank {rank}'s part of {slices.seq_len} tokens is {full_loss:.8g} on full sequences and "
                f"{slice_loss:.8g} on slices"
            )
            raise setting_error("mesh.context", slices.count, rule, 1)


def _batches(loader: TrainLoader, slices: Slices) -> tuple[Batch, Batch]:
    """Return the start of the next sample, with targets only in this rank's slice, and the slice itself.

    Positions without a target, such as those of a prompt, get their own token as the target, so that the loss covers
    all positions.
    """
    batch = _with_targets(loader.first_tokens(slices.seq_len))
    slice_batch = _with_targets(loader.first_tokens(slices.seq_len, slices))
    slice_targets = torch.full_like(batch["targets"], IGNORE)
    for start, stop in slices.pieces:
        slice_targets[:, start:stop] = batch["targets"][:, start:stop]
    return {**batch, "targets": slice_targets}, slice_batch


def _with_targets(batch: Batch) -> Batch:
    return {**batch, "targets": torch.where(batch["targets"] == IGNORE, batch["tokens"], batch["targets"])}


def _to_device(batch: Batch, world: World) -> Batch:
    return {name: entry.to(world.device) for name, entry in batch.items()}
