"""Models operator fusion by torch.compile: which kernels a block runs, and which tensors are never materialized.

Memory-bound operators are fused if one reads the output of another or both read the same tensor, unless a matrix
product or an attention kernel must run in between.  A fused kernel reads each input once and writes only outputs that
later kernels read or that are saved; everything else stays in registers.  Independent of any model and of the speed of
devices.

Source: Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", section 4.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.plan.kernels import Work


@dataclass(frozen=True)
class Operator:
    """One call of an operator: its work, and the bytes it reads and writes, by serial number of the storage."""

    work: Work
    reads: dict[int, int]
    writes: dict[int, int]
    is_fused: bool
    """Whether it can be fused: it is memory-bound and inside a compiled block."""


def fuse(operators: Sequence[Operator], kept: Collection[int]) -> tuple[Counter[Work], frozenset[int]]:
    """Return the kernels that `operators` are fused into, and the storages that fusion never materializes.

    `operators` are in execution order; `kept` are the storages that are still alive after the last one.
    """
    groups = _groups(operators)
    work: Counter[Work] = Counter(operator.work for operator in operators if not operator.is_fused)
    read_by: dict[int, set[int]] = defaultdict(set)
    for number, operator in enumerate(operators):
        for storage in operator.reads:
            read_by[storage].add(groups[number])
    made_by = {storage: groups[number] for number, one in enumerate(operators) for storage in one.writes}
    members: dict[int, list[Operator]] = defaultdict(list)
    for number, operator in enumerate(operators):
        if operator.is_fused:
            members[groups[number]].append(operator)
    never_made: set[int] = set()
    for group, fused in members.items():
        read, written = Counter[int](), Counter[int]()
        for operator in fused:
            for storage, num_bytes in operator.reads.items():
                if made_by.get(storage) != group:
                    read[storage] = max(read[storage], num_bytes)
            for storage, num_bytes in operator.writes.items():
                if storage in kept or read_by[storage] - {group}:
                    written[storage] = max(written[storage], num_bytes)
                else:
                    never_made.add(storage)
        num_bytes = sum(read.values()) + sum(written.values())
        if num_bytes:
            work[Work("memory", 0, num_bytes, fused[-1].work.element_size)] += 1
    return work, frozenset(never_made)


def _groups(operators: Sequence[Operator]) -> list[int]:
    """Return the kernel that each operator belongs to, identified by the index of one of its operators.

    Operators of the same stage that share a storage are fused; a stage ends where the result of a product is needed.
    """
    stage_of: dict[int, tuple[int, bool]] = {}
    parents = list(range(len(operators)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    seen: dict[tuple[int, int], int] = {}
    for number, operator in enumerate(operators):
        before = [stage_of[storage] for storage in operator.reads if storage in stage_of]
        # An operator that reads a product's result belongs to a later stage than the product's inputs.
        stage = max((at + (operator.is_fused and not is_fused) for at, is_fused in before), default=0)
        for storage in operator.writes:
            stage_of[storage] = stage, operator.is_fused
        if operator.is_fused:
            for storage in (*operator.reads, *operator.writes):
                first = seen.setdefault((stage, storage), number)
                parents[root(number)] = root(first)
    return [root(number) for number in range(len(operators))]
