"""The names of checkpoints, and the manifest, which lists a checkpoint's files with their sizes and checksums.

The manifest is written last, so a checkpoint without a manifest is incomplete.

The files of a checkpoint:

manifest.json               step, versions, mesh, size and checksum of every other file, and the manifest's own SHA-256
state.json                  non-tensor state that is the same on all ranks, such as counters and the data position
layout.json                 the file and byte range of each chunk of each tensor
__0_0.distcp ...            the tensors, one file per rank, in the format of torch.distributed.checkpoint
__0_0.blocks.json ...       the block checksums of each of those files
ranks/00000.safetensors     per-rank state, such as the states of random number generators
config.yaml                 the configuration of the run that wrote the checkpoint
.metadata                   on request: the layout as a pickle, for torch's own reader; never read here, and not listed
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.checkpoint.storage import MANIFEST, BlockReader, Blocks, Damaged, Storage, checksum_of, split_parent
from trainer.errors import UserError
from trainer.files import crc32

FORMAT_VERSION = 1
CHECKPOINT_PREFIX = "step_"
_NAME = re.compile(rf"{CHECKPOINT_PREFIX}(\d{{8,}})")
LAYOUT, STATE, CONFIG = "layout.json", "state.json", "config.yaml"
BLOCKS_SUFFIX = ".blocks.json"
"""Replaces the `.distcp` of a data file's name to form the name of its block-checksum file."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint: how and when it was written, and the size and checksum of each other file."""

    step: int
    world_size: int
    torch: str
    created: str
    """Time of writing in UTC, in ISO 8601 format."""
    files: Mapping[str, Sequence[int]]
    """(size in bytes, CRC-32) of every other file; for a data file, the CRC-32 covers its block checksums."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Size of each mesh axis, by name."""
    job: str = ""
    """The launcher's identifier of the job."""
    restarts: int = 0
    """How many times the launcher had restarted the job."""
    run_dir: str = ""
    """The run's folder."""
    num_skipped: int = 0
    """Number of consecutive steps skipped just before the save.  If above 0, the weights may be bad."""
    replaced_steps: Sequence[int] = ()
    """Steps of earlier saves that were due but did not succeed; this checkpoint replaces them."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Results of the evaluation at this step, keyed by metrics field; empty if the step was not evaluated."""
    metric: str = "loss"
    """The field of `evaluation` by which checkpoints were ranked."""
    higher_is_better: bool = False
    """True if higher values of `metric` are better."""
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> str:
        content = asdict(self)
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)


@dataclass(frozen=True)
class RunInfo:
    """The run that wrote a checkpoint: its configuration, mesh and job."""

    config_yaml: str
    mesh: Mapping[str, int]
    job: str = ""
    """The launcher's identifier of the job."""
    restarts: int = 0
    """How many times the launcher had restarted the job."""
    run_dir: str = ""
    """The run's folder."""


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"{CHECKPOINT_PREFIX}{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step in a checkpoint folder's name; None if it is not a checkpoint's name."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def list_steps(storage: Storage) -> list[int]:
    """Return the steps of the published checkpoints in `storage`, oldest first.  Some may be damaged."""
    steps = ((name, parse_step(name)) for name in storage.names())
    return sorted(step for name, step in steps if step is not None and storage.is_published(name))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(storage: Storage) -> Manifest:
    """Return the manifest of the checkpoint at `storage`.

    Raises Damaged if the manifest is corrupt or the folder is named after another step, FileNotFoundError if there is
    no manifest, and UserError if its format is not supported.
    """
    try:
        content = json.loads(storage.read(MANIFEST))
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise ValueError("its own checksum differs")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{storage}/{MANIFEST}: {error}") from error
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{storage}: has checkpoint format {version}; this version of meshtrainer reads format {FORMAT_VERSION}"
        )
    manifest, step_of_folder = Manifest(**content), parse_step(split_parent(str(storage))[1])
    if step_of_folder not in (None, manifest.step):
        raise Damaged(
            f"{storage}: holds the checkpoint of step {manifest.step}, so its name must be "
            f"{checkpoint_name(manifest.step)}"
        )
    return manifest


def check_is_of_run(storage: Storage, manifest: Manifest) -> None:
    """Raise UserError for a checkpoint that no run has written, but a CheckedWriter in another program."""
    missing = [name for name in (CONFIG, STATE) if name not in manifest.files]
    if missing:
        raise UserError(
            f"{storage}: is not the checkpoint of a run (it has no {missing[0]})\n"
            "  to fix: read it with torch.distributed.checkpoint.load and trainer.checkpoint.VerifiedReader"
        )


def blocks_name(data_file: str) -> str:
    """Return the name of the file with a data file's block checksums."""
    return data_file.removesuffix(".distcp") + BLOCKS_SUFFIX


def is_data_file(name: str) -> bool:
    """Return whether a file is a data file, which holds tensors."""
    return name.endswith(".distcp")


def read_file(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """Read and verify one of the small files.  Raises Damaged if it is missing, unreadable or altered."""
    if name not in manifest.files:
        raise Damaged(f"{storage}/{name}: not listed in the manifest")
    size, crc = manifest.files[name]
    try:
        data = storage.read(name)
    except OSError as error:
        raise Damaged(f"{storage}/{name}: {_reason(error)}") from error
    if len(data) != size:
        raise Damaged(f"{storage}/{name}: has {len(data)} bytes instead of {size}")
    if crc32(data) != crc:
        raise Damaged(f"{storage}/{name}: its checksum differs")
    return data


class StoredBlocks(Mapping[str, Blocks]):
    """The block checksums of each data file, by the file's name, loaded on demand and verified.

    A rank reads only a few data files; if every rank loaded all checksums, 512 ranks would open a quarter of a million
    files.  A lookup raises Damaged if the checksums themselves are damaged.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self._names = [name for name in manifest.files if is_data_file(name)]
        self._loaded: dict[str, Blocks] = {}

    def __getitem__(self, name: str) -> Blocks:
        if name not in self._loaded:
            size, crc = self._manifest.files[name]
            blocks = json.loads(read_file(self._storage, self._manifest, blocks_name(name)))
            if checksum_of(blocks) != crc or sum(length for length, _ in blocks) != size:
                raise Damaged(f"{self._storage}/{blocks_name(name)}: does not belong to this manifest")
            self._loaded[name] = blocks
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def find_damage(storage: Storage, manifest: Manifest, depth: str, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Return the problems in the files that `rank` checks, one line each.

    depth: `sizes` checks sizes only; `metadata` checks all bytes except those of large tensors, which are
    verified as they are read; `full` checks all bytes.  The files are divided among `num_ranks` ranks; by default, one
    rank checks them all.
    """
    damage = []
    for index, (name, (size, _)) in enumerate(sorted(manifest.files.items())):
        if index % num_ranks != rank:
            continue
        try:
            _check_file(storage, manifest, name, size, depth)
        except Damaged as error:
            damage.append(str(error))
        except OSError as error:
            damage.append(f"{storage}/{name}: {_reason(error)}")
    return damage


def _check_file(storage: Storage, manifest: Manifest, name: str, size: int, depth: str) -> None:
    actual = storage.size(name)
    if actual != size:
        raise Damaged(f"{storage}/{name}: has {actual} bytes instead of {size}")
    if depth == "sizes":
        return
    if not is_data_file(name):
        read_file(storage, manifest, name)
        return
    blocks = json.loads(read_file(storage, manifest, blocks_name(name)))
    reader = BlockReader(storage, name, blocks)
    try:
        reader.check(skip_tensors=depth == "metadata")
    finally:
        reader.close()


def _reason(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file of per-rank state."""
    return f"ranks/{rank:05d}.safetensors"
