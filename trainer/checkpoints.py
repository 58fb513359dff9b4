"""List and verify the checkpoints of a run.

    python -m trainer.checkpoints <run folder>                  list steps, sizes, ages and meshes; check sizes
    python -m trainer.checkpoints <run folder> --verify         check every checksum
    python -m trainer.checkpoints <run folder> --torch-metadata make them readable by torch's own FileSystemReader

Only the last form writes anything: a file `.metadata` in each checkpoint that has none.  The command exits with 1 if a
listed checkpoint is damaged, and with 2 if the arguments are invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone

from trainer.checkpoint.find import find_checkpoints, is_checkpoint
from trainer.checkpoint.manifest import (
    checkpoint_name,
    find_damage,
    list_steps,
    read_manifest,
)
from trainer.checkpoint.retention import best_step
from trainer.checkpoint.storage import MANIFEST, Damaged, Storage, open_storage, split_parent
from trainer.checkpoint.torch_metadata import TORCH_METADATA, add_torch_metadata
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    CommandParser,
    UserError,
    print_stdout,
    run_command,
)
from trainer.tables import table

_MAX_LISTINGS = 10
"""Maximum number of times to list a folder.  Listing is repeated until it finds no new checkpoints."""


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
    entries = [entry_by_step[step] for step in remaining]
    best = best_step(storage)
    for entry in entries:
        entry.is_best = entry.step is not None and entry.step == best
    return [*entries, *quarantined]


def _entry(storage: Storage, name: str, verify: bool) -> CheckpointEntry:
    folder = storage / name
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return CheckpointEntry(name, damage=(f"{folder}/{MANIFEST}: is missing",))
    except (Damaged, UserError, OSError) as error:
        return CheckpointEntry(name, damage=(str(error),))
    damage = tuple(find_damage(folder, manifest, "full" if verify else "sizes"))
    undamaged = "verified" if verify else "whole"
    skipped = _SAVED_WHILE_SKIPPING.format(name, manifest.num_skipped)
    return CheckpointEntry(
        name,
        step=manifest.step,
        bytes=manifest.num_bytes,
        created=manifest.created,
        mesh=" x ".join(f"{axis} {size}" for axis, size in manifest.mesh.items()),
        torch=manifest.torch,
        state="damaged" if damage else undamaged,
        damage=damage,
        num_skipped=manifest.num_skipped,
        notes=(skipped,) if manifest.num_skipped else (),
        evaluation=dict(manifest.evaluation),
    )


# ---------------------------------------------------------------------------------------------------------------
# The command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.checkpoints", description=__doc__)
    parser.add_argument("run_dir", help="a run folder, or a folder or URL with checkpoints")
    parser.add_argument("--verify", action="store_true", help="check every checksum")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--torch-metadata",
        action="store_true",
        help="write .metadata into each checkpoint that has none, for torch's own FileSystemReader",
    )
    options = parser.parse_args(argv)
    return run_command(lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    if is_checkpoint(options.run_dir):  # a single checkpoint, not a folder of checkpoints
        folder, name = split_parent(options.run_dir)
        storage = open_storage(folder)
        entries = [_entry(storage, name, options.verify)]
    else:
        storage = find_checkpoints(options.run_dir)
        entries = list_checkpoints(storage, options.verify)
    if options.torch_metadata:
        for entry in entries:
            checkpoint = storage / entry.name
            if entry.state in ("whole", "verified") and TORCH_METADATA not in checkpoint.names():
                add_torch_metadata(checkpoint)
    if options.json:
        print_stdout(json.dumps([asdict(entry) for entry in entries]))
    else:
        _print_list(storage, entries)
    return EXIT_FAILED if any(entry.state == "damaged" for entry in entries) else EXIT_FINISHED


def _print_list(storage: Storage, entries: Sequence[CheckpointEntry]) -> None:
    has_loss = any(entry.evaluation for entry in entries)
    headers = ["checkpoint", "size", "age", "mesh", "torch", *(["held-out loss"] if has_loss else []), "state"]
    rows = []
    for entry in entries:
        size = "" if entry.bytes is None else _size(entry.bytes)
        loss = f"{entry.evaluation['loss']:.4f}{' best' * entry.is_best}" if "loss" in entry.evaluation else ""
        cells = [entry.name, size, _age(entry.created), entry.mesh, entry.torch, *([loss] if has_loss else [])]
        rows.append([*cells, entry.state])
    print_stdout(f"{storage}\n{table(headers, rows, text_columns=(0, *range(3, len(headers))))}")
    for entry in entries:
        for line in (*entry.notes, *entry.damage):
            print_stdout(f"  {line}")


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
