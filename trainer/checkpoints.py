"""List, verify and compare the checkpoints of a run.

    python -m trainer.checkpoints <run folder>                  list steps, sizes, ages and meshes; check sizes
    python -m trainer.checkpoints <run folder> --verify         check every checksum
    python -m trainer.checkpoints <run folder> --diff 100 200   compare configuration, tensors and norms
    python -m trainer.checkpoints <run folder> --torch-metadata make them readable by torch's own FileSystemReader

Only the last form writes anything: a file `.metadata` in each checkpoint that has none.  The command exits with 1 if a
listed checkpoint is damaged, and with 2 if the arguments are invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone

import torch
from rich.console import Console
from rich.text import Text

from trainer.checkpoint.find import find_checkpoints, is_checkpoint
from trainer.checkpoint.layout import StoredTensor
from trainer.checkpoint.manifest import (
    checkpoint_name,
    find_damage,
    list_steps,
    read_manifest,
)
from trainer.checkpoint.retention import best_step
from trainer.checkpoint.storage import MANIFEST, Damaged, Storage, open_storage, split_parent
from trainer.checkpoint.torch_metadata import TORCH_METADATA, add_torch_metadata
from trainer.checkpoint.weights import StoredWeights
from trainer.config.changes import compare_stored
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    CommandParser,
    UserError,
    print_stdout,
    printable,
    run_command,
    setting_error,
)
from trainer.tables import table_lines, terminal_width

_MAX_LISTINGS = 10
"""Maximum number of times to list a folder.  Listing is repeated until it finds no new checkpoints."""

_BLOCK_BYTES = 64 << 20
"""Bytes of each tensor to read at a time when two checkpoints are compared."""


@dataclass
class CheckpointEntry:
    """A checkpoint in the printed list.  Fields that cannot be read from it keep their defaults."""

    name: str
    step: int | None = None
    bytes: int | None = None
    created: str = ""
    mesh: str = ""
    torch: str = ""
    state: str = "damaged"
    """`whole` (manifest and sizes match), `verified` (checksums match too), `damaged` or `quarantined`."""
    damage: tuple[str, ...] = ()
    num_skipped: int = 0
    """Number of consecutive steps skipped just before the save.  If it is above 0, runs do not resume from this
    checkpoint automatically, unless there is no other."""
    notes: tuple[str, ...] = ()
    """Remarks to print below the list."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Losses and metrics of the evaluation at this step."""
    is_best: bool = False
    """Whether RUN/best refers to this checkpoint."""


_SAVED_WHILE_SKIPPING = (
    "{}: was saved while steps were skipped ({} in a row); used only if checkpoint.resume names it, or if there "
    "is no other"
)


def list_checkpoints(storage: Storage, verify: bool = False) -> list[CheckpointEntry]:
    """Return the checkpoints in a folder in the order of their steps, then the quarantined ones.

    A run may be saving and pruning checkpoints at the same time.  Pruned ones are omitted, not reported as damaged.

    verify: whether to check every checksum, or only sizes.
    """
    entry_by_step: dict[int, CheckpointEntry] = {}
    for _ in range(_MAX_LISTINGS):
        steps = list_steps(storage)
        new_steps = [step for step in steps if step not in entry_by_step]
        entry_by_step |= {step: _entry(storage, checkpoint_name(step), verify) for step in new_steps}
        if not new_steps or not entry_by_step:
            break
    quarantined = [CheckpointEntry(name, state="quarantined") for name in storage.quarantined_names()]
    remaining = [
        step
        for step in sorted(entry_by_step)
        if not entry_by_step[step].damage or storage.is_published(checkpoint_name(step))
    ]
    entries, best = [entry_by_step[step] for step in remaining], best_step(storage)
    for entry in entries:
        entry.is_best = entry.step is not None and entry.step == best
    return [*entries, *quarantined]


def _entry(storage: Storage, name: str, verify: bool) -> CheckpointEntry:
    folder, entry = storage / name, CheckpointEntry(name)
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        entry.damage = (f"{folder}/{MANIFEST}: is missing",)
    except (Damaged, UserError, OSError) as error:
        entry.damage = (str(error),)
    else:
        entry.step, entry.bytes = manifest.step, manifest.num_bytes
        entry.created, entry.torch, entry.num_skipped = manifest.created, manifest.torch, manifest.num_skipped
        entry.evaluation = dict(manifest.evaluation)
        entry.mesh = " x ".join(f"{axis} {size}" for axis, size in manifest.mesh.items())
        entry.damage = tuple(find_damage(folder, manifest, "full" if verify else "sizes"))
        if manifest.num_skipped:
            entry.notes += (_SAVED_WHILE_SKIPPING.format(name, manifest.num_skipped),)
        entry.state = "damaged" if entry.damage else "verified" if verify else "whole"
    return entry


@dataclass
class TensorChange:
    """How one tensor differs between two checkpoints."""

    key: str
    before: str
    """Dtype and shape, or `absent`."""
    after: str
    norm_before: float | None = None
    norm_after: float | None = None
    relative: float | None = None
    """Norm of the difference, divided by `norm_before`; None if that is zero, or if the shapes or dtypes differ."""


def compare_tensors(first: StoredWeights, second: StoredWeights) -> Iterator[TensorChange]:
    """Yield each tensor that differs between two checkpoints or is in only one.  Reads one block of rows at a time."""
    for key in [*first.layout, *(key for key in second.layout if key not in first.layout)]:
        before, after = first.layout.get(key), second.layout.get(key)
        if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
            yield TensorChange(key, _shape_of(before), _shape_of(after))
            continue
        squares = torch.zeros(3, dtype=torch.float64)
        is_same = True
        for start, stop in _row_blocks(before):
            x, y = first.read_stored(key, start, stop), second.read_stored(key, start, stop)
            is_same = is_same and torch.equal(x, y)
            x, y = x.double(), y.double()
            squares += torch.stack([x.square().sum(), y.square().sum(), (y - x).square().sum()])
        if not is_same:
            norms = squares.sqrt().tolist()
            relative = norms[2] / norms[0] if norms[0] else None
            yield TensorChange(key, _shape_of(before), _shape_of(after), norms[0], norms[1], relative)


def _row_blocks(stored: StoredTensor) -> Iterator[tuple[int, int | None]]:
    if not stored.shape or not stored.num_bytes:
        yield 0, None
        return
    rows_per_block = max(1, _BLOCK_BYTES * stored.shape[0] // stored.num_bytes)
    for start in range(0, stored.shape[0], rows_per_block):
        yield start, min(start + rows_per_block, stored.shape[0])


def _shape_of(stored: StoredTensor | None) -> str:
    if stored is None:
        return "absent"
    dtype = str(stored.dtype).removeprefix("torch.")
    return f"{dtype} {'x'.join(map(str, stored.shape)) or 'scalar'}"


# ---------------------------------------------------------------------------------------------------------------
# The command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.checkpoints", description=__doc__)
    parser.add_argument("run_dir", help="a run folder, or a folder or URL with checkpoints")
    parser.add_argument("--verify", action="store_true", help="check every checksum")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two steps (or paths)")
    parser.add_argument("--all", action="store_true", help="with --diff: include the optimizer's tensors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--torch-metadata",
        action="store_true",
        help="write .metadata into each checkpoint that has none, for torch's own FileSystemReader",
    )
    options = parser.parse_args(argv)
    return run_command(lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    if is_checkpoint(options.run_dir) and not options.diff:  # a single checkpoint, not a folder of checkpoints
        folder, name = split_parent(options.run_dir)
        storage = open_storage(folder)
        entries = [_entry(storage, name, options.verify)]
    else:
        storage = find_checkpoints(options.run_dir)
        if options.diff:
            _show_diff(storage, options.diff, as_json=options.json, all_parts=options.all)
            return EXIT_FINISHED
        entries = list_checkpoints(storage, options.verify)
    if options.torch_metadata:
        for entry in entries:
            checkpoint = storage / entry.name
            if entry.state in ("whole", "verified") and TORCH_METADATA not in checkpoint.names():
                add_torch_metadata(checkpoint)
    if options.json:
        print_stdout(json.dumps([asdict(entry) for entry in entries]))
    else:
        _show_list(storage, entries)
    return EXIT_FAILED if any(entry.state == "damaged" for entry in entries) else EXIT_FINISHED


def _show_list(storage: Storage, entries: Sequence[CheckpointEntry]) -> None:
    console = Console(highlight=False)
    has_loss = any(entry.evaluation for entry in entries)
    headers = ["checkpoint", "size", "age", "mesh", "torch", *(["held-out loss"] if has_loss else []), "state"]
    rows = []
    for entry in entries:
        size = "" if entry.bytes is None else _size(entry.bytes)
        loss = f"{entry.evaluation['loss']:.4f}{' best' * entry.is_best}" if "loss" in entry.evaluation else ""
        cells = [entry.name, size, _age(entry.created), entry.mesh, entry.torch, *([loss] if has_loss else [])]
        rows.append([*map(printable, cells), entry.state])
    console.print(Text(printable(str(storage)), style="bold"), soft_wrap=True)
    for line in table_lines(headers, rows, text_columns=(0, *range(3, len(headers)))):
        console.print(Text(line), soft_wrap=True)
    for entry in entries:
        for note in entry.notes:
            console.print(f"  {note}", style="yellow", soft_wrap=True)
        for line in entry.damage:
            console.print(Text(printable(f"  {line}"), style="red"), soft_wrap=True)


def _show_diff(storage: Storage, names: Sequence[str], as_json: bool, all_parts: bool) -> None:
    before, after = (StoredWeights(_find_checkpoint(storage, name)) for name in names)
    configuration = compare_stored(before.config_yaml, after.config_yaml)
    changes = list(compare_tensors(before, after))
    if as_json:
        print_stdout(json.dumps({"configuration": configuration, "tensors": [asdict(change) for change in changes]}))
        return
    console = Console(highlight=False)
    console.print(f"configuration: {len(configuration)} keys differ", style="bold")
    for line in configuration:
        console.print(Text(printable(f"  {line}")), soft_wrap=True)
    shared = before.layout.keys() & after.layout.keys()
    for part in sorted({key.partition(".")[0] for key in before.layout.keys() | after.layout.keys()}):
        part_changes = [change for change in changes if change.key.startswith(f"{part}.")]
        num_same = sum(key.startswith(f"{part}.") for key in shared) - sum(
            change.key in shared for change in part_changes
        )
        heading = f"{part}: {len(part_changes)} tensors differ, {num_same} are bit-identical"
        console.print(Text(printable(heading), style="bold"))
        if part_changes and (part == "model" or all_parts):
            for line in _change_lines(part_changes):
                console.print(Text(printable(line)), soft_wrap=True)


def _change_lines(changes: Sequence[TensorChange]) -> Iterator[str]:
    """Yield a table of changed tensors, line by line.  Values are never truncated, even on a narrow terminal."""
    rows = []
    for change in changes:
        numbers = (change.norm_before, change.norm_after, change.relative)
        before, after, relative = ("" if n is None else f"{n:.4g}" for n in numbers)
        shape = change.before if change.after == change.before else f"{change.before} -> {change.after}"
        rows.append([change.key, before, after, relative, shape])
    headers = ["tensor", "norm before", "after", "change", "shape"]
    for line in table_lines(headers, rows, terminal_width() - 2, text_columns=(0, 4)):
        yield f"  {line}"


def _find_checkpoint(storage: Storage, name: str) -> Storage:
    if name.isdecimal():
        steps = list_steps(storage)
        if int(name) not in steps:
            raise setting_error("--diff", name, f"must be an existing step: {', '.join(map(str, steps))}")
        return storage / f"step_{int(name):08d}"
    return storage / name if name in storage.names() else open_storage(name)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def _age(created: str) -> str:
    if not created:
        return ""
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


if __name__ == "__main__":
    sys.exit(command_line())
