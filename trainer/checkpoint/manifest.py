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
.metadata                   the layout in torch's own format, for torch's tools; verified but never parsed here
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.checkpoint.storage import MANIFEST, BlockReader, Blocks, Damaged, Storage, checksum_of, split_parent
from trainer.errors import UserError
from trainer.files import crc32

FORMAT_VERSION = 3
_READABLE_VERSIONS = (2, 3)
"""Format versions that can be read.  In version 2, the layout is not run-length encoded."""
CHECKPOINT_PREFIX = "step_"
_NAME = re.compile(rf"{CHECKPOINT_PREFIX}(\d{{8,}})")
TORCH_METADATA = ".metadata"
BLOCKS_SUFFIX = ".blocks.json"
"""Replaces the `.distcp` of a data file's name to form the name of its block-checksum file."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint: how and when it was written, and the size and checksum of each other file."""

    step: int
    world_size: int
    mesh: Mapping[str, int]
    """Size of each mesh axis, by name."""
    torch: str
    created: str
    """Time of writing in UTC, in ISO 8601 format."""
    config_sha256: str
    files: Mapping[str, Sequence[int]]
    """(size in bytes, CRC-32) of every other file; for a data file, the CRC-32 covers its block checksums."""
    format_version: int = FORMAT_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_skipped(self) -> int:
        """Number of consecutive steps skipped just before the save.  If above 0, the weights may be bad."""
        return int(self.extra.get("num_skipped", 0))

    @property
    def replaced_steps(self) -> Sequence[int]:
        """Steps of earlier saves that were due but did not succeed; this checkpoint replaces them."""
        return tuple(self.extra.get("due", ()))

    @property
    def evaluation(self) -> Mapping[str, float]:
        """Results of the evaluation at this step, keyed by metrics field; empty if the step was not evaluated."""
        losses: Mapping[str, float] = self.extra.get("evaluation", {})
        return losses

    @property
    def metric(self) -> str:
        """The field of `evaluation` by which checkpoints were ranked."""
        return str(self.extra.get("metric", "loss"))

    @property
    def higher_is_better(self) -> bool:
        """True if higher values of `metric` are better."""
        return bool(self.extra.get("higher_is_better", False))

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
    check_format(storage, content.get("format_version"))
    manifest, step_of_folder = Manifest(**content), parse_step(split_parent(str(storage))[1])
    if step_of_folder not in (None, manifest.step):
        raise Damaged(
            f"{storage}: holds the checkpoint of step {manifest.step}, so its name must be "
            f"{checkpoint_name(manifest.step)}"
        )
    return manifest


def check_format(storage: Storage, version: object) -> None:
    """Raise UserError, with advice, if this version of the trainer does not support the format."""
    if version in _READABLE_VERSIONS:
        return
    if isinstance(version, int) and version > FORMAT_VERSION:
        advice = "update meshtrainer"
    else:
        advice = (
            "its index is a pickle without a checksum, which is not read here.  To train from its weights:\n"
            "  python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{shlex.quote(str(storage))} weights.pt\n"
            "  and train.init_from=weights.pt"
        )
    raise UserError(
        f"{storage}: has checkpoint format {version}; this version of meshtrainer reads formats "
        f"{' and '.join(map(str, _READABLE_VERSIONS))}; {advice}"
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

    depth: `sizes` checks sizes only; `metadata` checks all bytes except those of large tensors, which `read_tensors`
    verifies as it reads them; `full` checks all bytes.  The files are divided among `num_ranks` ranks; by default, one
    rank checks them all.  `.metadata`, which is for torch's tools, is not checked, since nothing here depends on it.
    """
    damage = []
    checked = sorted((name, size) for name, (size, _) in manifest.files.items() if name != TORCH_METADATA)
    for index, (name, size) in enumerate(checked):
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
