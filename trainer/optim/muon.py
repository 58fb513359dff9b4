"""Muon and NorMuon on sharded parameters: each matrix is orthogonalized once, by one rank, on any mesh.

Muon replaces a matrix's momentum with (nearly) the closest orthogonal matrix.  This needs the full matrix, but each
rank holds only part of it.  So each matrix has one owner among all ranks, including replicas.  A step updates the
momentum of the local parts and sends it to the owners, which orthogonalize the matrices and send the results back to
all ranks that hold a part.  Each direction takes at most one all-to-all per bucket of matrices (nothing is sent to
owners if every rank holds full matrices), and one bucket is sent while another is computed.  No matmul is split between
ranks, so Muon's result does not depend on the mesh.  NorMuon also sums squared norms over ranks, so its results on two
meshes may differ in the last bits.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Li et al. 2025, "NorMuon", arXiv:2510.05491;
Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982 (the scale `match_rms_adamw`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.errors import setting_error
from trainer.model.parameters import division_of, local, mesh_of
from trainer.model.placement import Division

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients (a, b, c) of the polynomials a x + b x^3 + c x^5, one for each iteration.

They are Jordan's, and map singular values above 0.002 into [0.68, 1.21]."""

_EPS = 1e-7
"""Lower bound on the norms that matrices are divided by."""
_ROW_BETA, _ROW_EPS = 0.95, 1e-8
"""NorMuon's decay rate for the rows' mean squares, and the epsilon added to their root."""


# ---------------------------------------------------------------------------------------------------------------
# One matrix


def orthogonalize(batch: torch.Tensor) -> torch.Tensor:
    """Return matrices of the same shape (B, R, N) with singular values near 1, by Newton-Schulz iterations.

    Computed in the dtype of `batch`.  Zero matrices stay zero.  Needs memory for two batches and for two Gram
    matrices per matrix, provided that the caller keeps no reference to `batch`.
    """
    is_tall = batch.shape[1] > batch.shape[2]
    x = batch.mT if is_tall else batch
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    del batch
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        del gram  # before the next one is allocated
    return x.mT if is_tall else x


def orthogonalization_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of `orthogonalize` for one matrix."""
    short, long = sorted((rows, columns))
    return len(NEWTON_SCHULZ) * (4 * short * short * long + 2 * short**3)


def update_scale(scale: str, rows: int, columns: int) -> float:
    """Return the factor between an orthogonal matrix and the update at learning rate 1.

    match_rms_adamw: a root mean square of 0.2, like that of AdamW's updates, so that both can share a learning rate.
    spectral: a spectral norm of sqrt(rows / columns), at which the best rate does not depend on the width (muP).
    jordan: as in the original implementation of Muon.
    """
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns) if scale == "spectral" else math.sqrt(max(1.0, rows / columns))


def relative_update(scale: str, rows: int, columns: int) -> float:
    """Return the size of updates relative to the scale `spectral`, with which one learning rate suits all widths."""
    return update_scale(scale, rows, columns) / update_scale("spectral", rows, columns)


# ---------------------------------------------------------------------------------------------------------------
# Owners


@dataclass(frozen=True)
class Matrix:
    """Consecutive rows of a parameter that are orthogonalized together: a full parameter, an expert, or a block."""

    parameter: int
    """Index among the optimizer's parameters."""
    expert: int
    """Index along the first dimension of a parameter of shape (E, K, N); 0 for one of shape (K, N)."""
    start: int
    """Index of its first row among the K rows."""
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        return orthogonalization_flops(self.rows, self.columns)


def split_into_matrices(number: int, shape: Sequence[int], block_rows: Sequence[int] = ()) -> list[Matrix]:
    """Return the matrices of parameter `number`, which has two or three dimensions.

    block_rows: number of rows in each block of a fused two-dimensional weight, such as a query-key-value projection.
    """
    *experts, rows, columns = shape
    count, matrices = experts[0] if experts else 1, []
    for expert in range(count):
        start = 0
        for size in list(block_rows) or [rows]:
            matrices.append(Matrix(number, expert, start, size, columns))
            start += size
    return matrices


@dataclass(frozen=True)
class Piece:
    """The part of a matrix that one rank holds."""

    matrix: int
    """Index of the matrix in its bucket."""
    start: int
    """First row within the matrix."""
    rows: int
    first_column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def select(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the elements of this piece from the full matrix: (rows, columns)."""
        return matrix[self.start : self.start + self.rows, self.first_column : self.first_column + self.columns]


def assign_owners(
    matrices: Sequence[Matrix], num_local: Callable[[Matrix, int], int], replicate: int, shard: int
) -> list[int]:
    """Return the owner of each matrix, a rank of a mesh of `replicate` x `shard` ranks, balanced by FLOPs.

    num_local: `num_local(matrix, s)` is the number of elements of a matrix on rank `s` of each replica.  A matrix that
    is whole on one rank, such as an expert, is assigned to that rank, so that nothing needs to be sent, unless that
    would unbalance the work.  The others are assigned, costliest first, to the rank with the least work.  The result
    depends only on the arguments, so all ranks compute the same one.
    """
    num_ranks = replicate * shard
    load = [0] * num_ranks
    owners = [-1] * len(matrices)
    costliest_first = sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, i))
    if shard > 1:
        fair_share = sum(matrix.flops for matrix in matrices) / num_ranks
        for i in costliest_first:
            holder = next((s for s in range(shard) if num_local(matrices[i], s) == matrices[i].numel), None)
            if holder is not None:
                rank = min((r * shard + holder for r in range(replicate)), key=lambda rank: (load[rank], rank))
                if load[rank] + matrices[i].flops <= fair_share:
                    owners[i] = rank
                    load[rank] += matrices[i].flops
    for i in costliest_first:
        if owners[i] < 0:
            owners[i] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
            load[owners[i]] += matrices[i].flops
    return owners


def bucket_matrices(matrices: Sequence[Matrix], capacity: float) -> list[list[int]]:
    """Return the indices of the matrices in each bucket: at most `capacity` elements, or a single larger matrix.

    The costliest matrices come first.  Matrices of the same shape are adjacent, since they are computed as one batch.
    """
    buckets: list[list[int]] = []
    numel_left = 0.0
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, matrices[i].rows, i)):
        if not buckets or matrices[i].numel > numel_left:
            buckets.append([])
            numel_left = capacity
        buckets[-1].append(i)
        numel_left -= matrices[i].numel
    return buckets


class Ownership:
    """The part of each parameter that a rank of a mesh holds, and the owner of each matrix.  Pure arithmetic.

    shapes, divisions: those of each parameter.
    matrices: the matrices of all parameters.
    bucket_numel: maximum number of elements that a rank receives in a bucket's two messages together, unless a single
        matrix exceeds it.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        divisions: Sequence[Division],
        matrices: Sequence[Matrix],
        replicate: int,
        shard: int,
        bucket_numel: float,
    ) -> None:
        self.replicate, self.shard = replicate, shard
        self._boxes = [
            [((0, 1), *division.box(shape, s))[-3:] for s in range(shard)]  # a single matrix counts as a stack
            for shape, division in zip(shapes, divisions, strict=True)
        ]
        owners = assign_owners(matrices, self._local_numel, replicate, shard)
        # A rank receives the fraction 1 / (replicate * shard) of the elements as an owner, and 1 / shard as a holder.
        capacity = bucket_numel * shard / (1 + 1 / replicate)
        self._owned = [[(matrices[i], owners[i]) for i in bucket] for bucket in bucket_matrices(matrices, capacity)]
        """The matrices of each bucket with their owners."""

    def buckets(self, rank: int) -> list[Bucket]:
        """Return the buckets as one rank exchanges them."""
        return [Bucket(self, bucket, rank) for bucket in self._owned]

    def _local_numel(self, matrix: Matrix, s: int) -> int:
        return self.piece_of(0, matrix, s).numel

    def piece_of(self, number: int, matrix: Matrix, s: int) -> Piece:
        """Return the piece of a matrix on rank `s` of a replica.  number: the index of the matrix in its bucket."""
        experts, rows, columns = self._boxes[matrix.parameter][s]
        if not experts[0] <= matrix.expert < experts[1]:
            return Piece(number, 0, 0, 0, 0)
        start, stop = max(matrix.start, rows[0]), min(matrix.start + matrix.rows, rows[1])
        return Piece(number, start - matrix.start, max(0, stop - start), columns[0], columns[1] - columns[0])

    def local_rows(self, matrix: Matrix, piece: Piece, s: int) -> slice:
        """Return the rows of a piece on rank `s` of a replica among all rows that it holds of the parameter."""
        experts, rows, _ = self._boxes[matrix.parameter][s]
        start = (matrix.expert - experts[0]) * (rows[1] - rows[0]) + matrix.start + piece.start - rows[0]
        return slice(start, start + piece.rows)


class Bucket:
    """Matrices exchanged together, and the pieces in each message of one rank.

    A message is a flat tensor of pieces, ordered by peer, then by matrix.  Each rank derives the layout of all of its
    messages from the owners.
    """

    def __init__(self, ownership: Ownership, owned: Sequence[tuple[Matrix, int]], rank: int) -> None:
        """`owned`: the matrices with their owners.  `rank`: this rank among all ranks, replica by replica."""
        self.matrices = [matrix for matrix, _ in owned]
        by_owner: dict[int, list[int]] = defaultdict(list)
        for i, (_, owner) in enumerate(owned):
            by_owner[owner].append(i)
        self._by_owner = by_owner
        shard, (replica, own) = ownership.shard, divmod(rank, ownership.shard)

        def pieces(indices: Iterable[int], s: int) -> list[Piece]:
            candidates = [ownership.piece_of(i, self.matrices[i], s) for i in indices]
            return [piece for piece in candidates if piece.numel]

        self.owned = by_owner.get(rank, [])
        """The matrices that this rank owns."""
        self.local = pieces(range(len(owned)), own)
        """The pieces that this rank holds, in the order of the matrices."""
        first = replica * shard
        self.to_owners = [pieces(by_owner.get(first + s, ()), own) for s in range(shard)]
        """The local pieces that each rank of this replica needs as an owner."""
        self.from_holders = [pieces(self.owned, s) for s in range(shard)]
        all_ranks = range(ownership.replicate * shard)
        self.to_holders = [self.from_holders[peer % shard] for peer in all_ranks]
        self.from_owners = [pieces(by_owner.get(peer, ()), own) for peer in all_ranks]

    def with_spans(self, pieces: Sequence[Sequence[Piece]]) -> Iterator[tuple[Piece, slice]]:
        """Yield each piece of a message with the range that its elements occupy in the message."""
        start = 0
        for piece in itertools.chain.from_iterable(pieces):
            stop = start + piece.numel
            yield piece, slice(start, stop)
            start = stop

    def sizes(self, pieces: Sequence[Sequence[Piece]]) -> list[int]:
        """Return the number of elements in each peer's part of a message."""
        return [sum(piece.numel for piece in part) for part in pieces]

    def owned_by_shape(self) -> dict[tuple[int, int], list[int]]:
        """Return the matrices that this rank owns by their rows and columns; each list is computed as one batch."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in self.owned:
            by_shape[self.matrices[i].rows, self.matrices[i].columns].append(i)
        return by_shape

    def costs(self) -> BucketCosts:
        """Return what it costs this rank to update the bucket."""
        by_shape = {shape: len(indices) for shape, indices in self.owned_by_shape().items()}
        return BucketCosts(
            sent_to_owners=sum(self.sizes(self.to_owners)),
            owned=sum(self.sizes(self.from_holders)),
            sent_to_holders=sum(self.sizes(self.to_holders)),
            held=sum(self.sizes(self.from_owners)),
            iteration_numel=max((n * (r * c + min(r, c) ** 2) for (r, c), n in by_shape.items()), default=0),
            largest_piece=max((piece.numel for piece in self.local), default=0),
            num_matrices=len(self.matrices),
            num_shapes=len(by_shape),
            flops=max(sum(self.matrices[i].flops for i in indices) for indices in self._by_owner.values()),
        )


@dataclass(frozen=True)
class BucketCosts:
    """The costs of updating one bucket, for one rank.  Sizes are numbers of elements."""

    sent_to_owners: int
    owned: int
    """Received by the rank as an owner: all elements of the matrices that it owns."""
    sent_to_holders: int
    held: int
    """Received by the rank as a holder: its parts of the matrices."""
    iteration_numel: int
    """Size of the largest batch of equally shaped matrices that the rank owns, with one Gram matrix for each."""
    largest_piece: int
    """Size of the largest part of a matrix that the rank holds."""
    num_matrices: int
    num_shapes: int
    """Number of different shapes among the matrices that the rank owns."""
    flops: int
    """FLOPs of the busiest rank."""


# ---------------------------------------------------------------------------------------------------------------
# Exchange


class _Mesh:
    """The ranks that hold parameters: `replicate` copies of the model, each divided among `shard` ranks."""

    def __init__(self, parameter: torch.Tensor) -> None:
        mesh = mesh_of(parameter)
        self.device = local(parameter).device if mesh is None else torch.device(mesh.device_type)
        self.replicate = self.shard = 1
        self.replica_rank = self.shard_rank = 0
        self.shard_group: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None
        self.position: list[int] = [0]
        """The rank within `group` of each rank of the mesh, replica by replica."""
        if mesh is None or mesh.size() == 1:
            return
        axis = _shard_axis(parameter)
        ranks = mesh.mesh if axis is None else mesh.mesh.movedim(axis, -1)
        if axis is not None:
            self.shard, self.shard_rank = mesh.size(axis), mesh.get_local_rank(axis)
            self.shard_group = mesh.get_group(axis)
        self.replicate = mesh.size() // self.shard
        order = ranks.flatten().tolist()
        self.replica_rank = order.index(dist.get_rank()) // self.shard
        if mesh.ndim == 1:
            self.group = mesh.get_group(0)
        elif sorted(order) == list(range(dist.get_world_size())):
            self.group = dist.group.WORLD
        else:
            raise ValueError("muon: the mesh of a parameter must contain all ranks")
        assert self.group is not None
        self.position = [dist.get_group_rank(self.group, rank) for rank in order]

    @property
    def size(self) -> int:
        return self.replicate * self.shard

    @property
    def rank(self) -> int:
        return self.replica_rank * self.shard + self.shard_rank


def _shard_axis(parameter: torch.Tensor) -> int | None:
    """Return the axis of `mesh_of(parameter)` that divides the parameter; None if every rank holds all of it."""
    if not isinstance(parameter, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(axes) > 1:  # the shard axis, split in two
        return parameter.device_mesh.ndim - len(axes)
    return axes[0] if axes else None


def _division_of(parameter: torch.Tensor) -> Division:
    division = division_of(parameter)
    if division is None:
        rule = f"a parameter of shape {tuple(parameter.shape)} is sharded in an unknown way"
        raise setting_error("optim.name", "muon", rule, "adamw")
    return division


class _Layout(Ownership):
    """The parameters of one mesh, and the buckets of this rank."""

    def __init__(self, parameters: Sequence[torch.Tensor], matrices: Sequence[Matrix], bucket_numel: float) -> None:
        self.mesh = _Mesh(parameters[0])
        shapes, divisions = [tuple(p.shape) for p in parameters], [_division_of(p) for p in parameters]
        super().__init__(shapes, divisions, matrices, self.mesh.replicate, self.mesh.shard, bucket_numel)
        self.own_buckets = self.buckets(self.mesh.rank)


# ---------------------------------------------------------------------------------------------------------------
# The optimizer


class Muon(torch.optim.Optimizer):
    """Muon or NorMuon for parameters of two dimensions, or three if they stack matrices.

    The momentum is sharded like its parameter and has the name that torch.optim.Muon gives it.  NorMuon adds the mean
    squares of the rows, sharded like them.  As with torch's fused optimizers, nothing changes if the attribute
    `found_inf`, a scalar tensor, is 1, and gradients are divided by the attribute `grad_scale`.

    blocks: number of rows in each block of fused parameters, by the parameter's id.
    dtype: the dtype of messages and iterations.
    bucket_bytes: maximum number of bytes that a rank receives in a bucket's two messages together, unless a single
        matrix exceeds it.
    Collectives in a step: two all-to-alls per bucket; for NorMuon also one all-reduce of a number per matrix.
    The parameters of NorMuon must not be divided along their columns.
    Raises UserError for a parameter that is divided in an unknown way.
    """

    supports_found_inf = True

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        variant: str = "muon",
        scale: str = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
        bucket_bytes: float = 64 * 2**20,
        blocks: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults)
        self.algorithm = "NorMuon" if variant == "normuon" else "Muon"
        self._normalizes_rows = variant == "normuon"
        self._scale = scale
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._blocks = dict(blocks or {})
        self._layouts: dict[tuple[int, ...], list[_Layout]] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Perform one step for all parameters that have a gradient, which must be the same on all ranks."""
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.device.type == "cpu":  # reading it causes no host sync
            if found_inf:
                return
            found_inf = None
        groups = {id(p): group for group in self.param_groups for p in group["params"] if p.grad is not None}
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for layout, members in self._layouts_of(parameters):
            _Step(self, layout, members, groups, found_inf, grad_scale).run()

    def _layouts_of(self, parameters: list[torch.Tensor]) -> list[tuple[_Layout, list[torch.Tensor]]]:
        """Return the layout of the parameters of each mesh."""
        by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_mesh[mesh_of(parameter)].append(parameter)
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            layouts = []
            for members in by_mesh.values():
                split = [split_into_matrices(n, p.shape, self._blocks.get(id(p), ())) for n, p in enumerate(members)]
                matrices = list(itertools.chain.from_iterable(split))
                layouts.append(_Layout(members, matrices, self._bucket_bytes / self._dtype.itemsize))
            self._layouts[key] = layouts
        return list(zip(self._layouts[key], by_mesh.values(), strict=True))


class _Step:
    """One step over the parameters of one layout."""

    def __init__(
        self,
        optimizer: Muon,
        layout: _Layout,
        parameters: list[torch.Tensor],
        groups: Mapping[int, dict[str, Any]],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        self._optimizer, self._layout, self._mesh = optimizer, layout, layout.mesh
        self._groups = [groups[id(p)] for p in parameters]
        self._found_inf, self._grad_scale = found_inf, grad_scale
        states = [self._state_of(p) for p in parameters]
        self._weights = [_as_rows(p) for p in parameters]
        self._gradients = [_as_rows(p.grad) for p in parameters]
        self._momenta = [_as_rows(state["momentum_buffer"]) for state in states]
        self._squares = [local(s["row_squares"]).view(-1) for s in states] if optimizer._normalizes_rows else []

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.detach())
        if self._optimizer._normalizes_rows and "row_squares" not in state:
            state["row_squares"] = torch.zeros_like(parameter.detach()[..., :1], dtype=torch.float32)
        return state

    def run(self) -> None:
        """Update all parameters.

        Up to three buckets are in flight: one is being sent to the owners, one is being computed, and the results of
        another are being sent back.  All ranks start the collectives in this order.
        """
        buckets = self._layout.own_buckets
        gathering: dict[int, _Message] = {}
        scattering: dict[int, _Message] = {}
        for turn in range(len(buckets) + 2):
            if turn < len(buckets):
                gathering[turn] = self._gather(buckets[turn])
            if 0 <= turn - 1 < len(buckets):
                scattering[turn - 1] = self._scatter(buckets[turn - 1], gathering.pop(turn - 1))
            if turn >= 2:
                self._update_rows(buckets[turn - 2], scattering.pop(turn - 2).wait())

    def _gather(self, bucket: Bucket) -> _Message:
        """Update the momentum of the local rows, and send them to their owners in this replica."""
        sent_sizes, received_sizes = bucket.sizes(bucket.to_owners), bucket.sizes(bucket.from_holders)
        sent = self._new_message(sent_sizes)
        spans = {piece.matrix: span for piece, span in bucket.with_spans(bucket.to_owners)}
        for piece in bucket.local:
            direction = self._direction(bucket.matrices[piece.matrix], piece)
            if piece.matrix in spans:
                sent[spans[piece.matrix]].view_as(direction).copy_(direction)
            del direction  # before the next one is allocated
        return _Message(sent, sent_sizes, received_sizes, self._mesh.shard_group, range(self._mesh.shard))

    def _direction(self, matrix: Matrix, piece: Piece) -> torch.Tensor:
        """Update the momentum of a piece of a matrix and return its Nesterov momentum, of shape (rows, columns)."""
        rows = self._local_rows(matrix, piece)
        gradient, momentum = self._gradients[matrix.parameter][rows], self._momenta[matrix.parameter][rows]
        beta = self._groups[matrix.parameter]["momentum"]
        if self._grad_scale is not None:
            gradient = gradient / self._grad_scale
        if self._found_inf is not None:  # replacing the gradient with the momentum leaves the momentum unchanged
            gradient = torch.where(self._found_inf > 0, momentum, gradient)
        momentum.lerp_(gradient.to(momentum.dtype), 1 - beta)
        return gradient.to(momentum.dtype).lerp(momentum, beta)

    def _local_rows(self, matrix: Matrix, piece: Piece) -> slice:
        return self._layout.local_rows(matrix, piece, self._mesh.shard_rank)

    def _new_message(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(sizes), device=self._mesh.device, dtype=self._optimizer._dtype)

    def _scatter(self, bucket: Bucket, message: _Message) -> _Message:
        """Orthogonalize the matrices that this rank owns, and send their pieces to all ranks that hold them."""
        sent_sizes, received_sizes = bucket.sizes(bucket.to_holders), bucket.sizes(bucket.from_owners)
        sent = self._new_message(sent_sizes)
        self._orthogonalize(bucket, message.wait(), sent)
        del message  # frees its memory before the next message is allocated
        return _Message(sent, sent_sizes, received_sizes, self._mesh.group, self._mesh.position)

    def _orthogonalize(self, bucket: Bucket, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Orthogonalize the matrices in `received`, one batch per shape, and write the results to `sent`."""
        parts: dict[int, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        for piece, span in bucket.with_spans(bucket.from_holders):
            parts[piece.matrix].append((piece, received[span].view(piece.rows, piece.columns)))
        spans: dict[int, list[tuple[Piece, slice]]] = defaultdict(list)
        for piece, span in bucket.with_spans(bucket.to_holders):
            spans[piece.matrix].append((piece, span))
        for (rows, columns), indices in bucket.owned_by_shape().items():
            # No variable refers to the batch, so that its memory is freed when the iterations start.
            results = orthogonalize(_assemble([parts.pop(i) for i in indices], rows, columns))
            for i, matrix in zip(indices, results.unbind(), strict=True):
                for piece, span in spans[i]:
                    sent[span].view(piece.rows, piece.columns).copy_(piece.select(matrix))
            del results, matrix  # before the next batch is allocated

    def _update_rows(self, bucket: Bucket, received: torch.Tensor) -> None:
        """Update the local rows of the weights."""
        updates: dict[int, torch.Tensor] = {}
        pieces: dict[int, Piece] = {}
        for piece, span in bucket.with_spans(bucket.from_owners):
            updates[piece.matrix] = received[span].view(piece.rows, piece.columns)
            pieces[piece.matrix] = piece
        if self._optimizer._normalizes_rows:
            updates = self._normalized(bucket, updates, pieces)
        for i, update in updates.items():
            matrix = bucket.matrices[i]
            group, weight = self._groups[matrix.parameter], self._weights[matrix.parameter]
            rows = weight[self._local_rows(matrix, pieces[i])]
            step_size = group["lr"] * update_scale(self._optimizer._scale, matrix.rows, matrix.columns)
            update = update.to(weight.device)
            new = rows if self._found_inf is None else rows.clone()
            new.mul_(1 - group["lr"] * group["weight_decay"])
            new.add_(update, alpha=-step_size)
            if self._found_inf is not None:
                rows.copy_(torch.where(self._found_inf > 0, rows, new))

    def _normalized(
        self, bucket: Bucket, updates: Mapping[int, torch.Tensor], pieces: Mapping[int, Piece]
    ) -> dict[int, torch.Tensor]:
        """Divide each row by the root of its running mean square, and give each matrix an orthogonal matrix's norm."""
        norms = torch.zeros(len(bucket.matrices), device=self._mesh.device, dtype=torch.float32)
        divided: dict[int, torch.Tensor] = {}
        for i, update in updates.items():
            matrix = bucket.matrices[i]
            squares = self._squares[matrix.parameter][self._local_rows(matrix, pieces[i])]
            update = update.to(squares.device).float()
            mean = update.square().mean(dim=1)
            if self._found_inf is not None:
                mean = torch.where(self._found_inf > 0, squares, mean)
            squares.lerp_(mean, 1 - _ROW_BETA)
            divided[i] = update / (squares.sqrt() + _ROW_EPS)[:, None]
            norms[i] = divided[i].square().sum()
        if self._mesh.shard_group is not None:
            dist.all_reduce(norms, group=self._mesh.shard_group)
        inverse = norms.sqrt().clamp(min=_EPS).reciprocal()
        for i, update in divided.items():
            matrix = bucket.matrices[i]
            # The root is a Python number, since copying a tensor from the host would cause a sync.
            update.mul_((math.sqrt(min(matrix.rows, matrix.columns)) * inverse[i]).to(update.device))
        return divided


class _Message:
    """An all-to-all in flight.

    sent_sizes: number of elements for each peer, in the caller's order of peers.
    received_sizes: number of elements from each peer, in the same order.
    positions: the peers' ranks in `group`.

    Without a group, the received tensor is the sent one.
    """

    def __init__(
        self,
        sent: torch.Tensor,
        sent_sizes: list[int],
        received_sizes: list[int],
        group: dist.ProcessGroup | None,
        positions: Sequence[int],
    ) -> None:
        self._received, self._work = sent, None
        self._parts: list[int] | None = None
        if group is None:
            return
        order = sorted(range(len(positions)), key=lambda i: positions[i])
        if order != list(range(len(order))):
            sent = torch.cat([sent.split(sent_sizes)[i] for i in order])
            self._parts = [order.index(i) for i in range(len(order))]
        self._sizes = [received_sizes[i] for i in order]
        self._sent = sent  # kept alive until it has been sent
        self._received = sent.new_empty(sum(received_sizes))
        self._work = dist.all_to_all_single(
            self._received, sent, self._sizes, [sent_sizes[i] for i in order], group=group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Return the received elements, in the order of the peers.  On a GPU the host does not wait."""
        if self._work is not None:
            self._work.wait()
            del self._sent
            self._work = None
        if self._parts is None:
            return self._received
        split = self._received.split(self._sizes)
        return torch.cat([split[i] for i in self._parts])


def _assemble(parts: Sequence[Sequence[tuple[Piece, torch.Tensor]]], rows: int, columns: int) -> torch.Tensor:
    """Return matrices (B, R, N) from the parts of each, which form a grid, in any order."""
    in_order = [sorted(each, key=lambda part: (part[0].start, part[0].first_column)) for each in parts]
    if all(piece.columns == columns for piece, _ in itertools.chain.from_iterable(in_order)):
        return torch.cat([values for _, values in itertools.chain.from_iterable(in_order)]).view(-1, rows, columns)
    matrices = in_order[0][0][1].new_empty(len(in_order), rows, columns)
    for matrix, each in zip(matrices, in_order, strict=True):
        for start, strip in itertools.groupby(each, key=lambda part: part[0].start):
            side_by_side = [values for _, values in strip]
            torch.cat(side_by_side, dim=1, out=matrix[start : start + side_by_side[0].shape[0]])
    return matrices


def _as_rows(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a view (rows, columns) of this rank's shard of a parameter, or of a tensor with its shape."""
    assert tensor is not None
    part = local(tensor).detach()
    return part.view(-1, part.shape[-1])
