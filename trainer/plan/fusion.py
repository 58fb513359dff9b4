"""A block's operators after torch.compile has fused them: the kernels, and what never lies in memory.

Operators that only move numbers are fused where one reads what another makes, or both read the same, unless a product
or an attention must run in between.  A fused kernel reads what it is given once and writes what is read behind it, or
kept; everything else stays in registers.  Source: Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through
Dynamic Python Bytecode Transformation and Graph Compilation", section 4.  Knows no model and no device's speed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.plan.kernels import Work


@dataclass(frozen=True)
class Operator:
    """One call of an operator: its work, and the bytes that it reads and writes of each storage, by serial number."""

    work: Work
    reads: dict[int, int]
    writes: dict[int, int]
    is_fused: bool
    """Whether it may be fused: it is inside a compiled block, and only moves numbers."""


def fuse(operators: Sequence[Operator], kept: Collection[int]) -> tuple[Counter[Work], frozenset[int]]:
    """Return the kernels that fusion makes of `operators`, which ran in this order, and the storages that it saves.

    kept: storages that outlive them.
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
    """Return the kernel that each operator is part of, by the number of its first one.

    Fused are those of one stage that share a storage: a stage ends where a product's result is needed.
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
        # What reads a product's result is of a later stage than what the product reads.
        stage = max((at + (operator.is_fused and not is_fused) for at, is_fused in before), default=0)
        for storage in operator.writes:
            stage_of[storage] = stage, operator.is_fused
        if operator.is_fused:
            for storage in (*operator.reads, *operator.writes):
                first = seen.setdefault((stage, storage), number)
                parents[root(number)] = root(first)
    return [root(number) for number in range(len(operators))]
