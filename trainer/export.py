"""Export the weights of a checkpoint to formats that other software reads.

    python -m trainer.export <run or checkpoint> <folder>             Hugging Face format, or peft's for adapters
    python -m trainer.export <run or checkpoint> <folder> --merged    Hugging Face format, with adapters merged in
    python -m trainer.export <run or checkpoint> --push org/name      to the Hugging Face Hub, with a model card
    python -m trainer.export <run or checkpoint> weights.pt           a plain state dict, written with torch.save
    python -m trainer.export <run or checkpoint> weights.safetensors  a plain state dict, in safetensors format

Uses one process.  A folder is written file by file, so the model may be larger than memory.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch

from trainer import __version__
from trainer.checkpoint.weights import open_checkpoint
from trainer.config.load import load_stored
from trainer.config.schema import RunConfig
from trainer.config.weights import allows_other_tokenizer
from trainer.data.prompts import chat_stop_ids
from trainer.data.records import kind_of
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import (
    EXIT_FINISHED,
    CommandParser,
    UserError,
    local_argument,
    print_stderr,
    print_stdout,
    run_command,
)
from trainer.files import atomic_replace, temporary_folder, writing_to
from trainer.hub import repo_id_of, upload
from trainer.metrics.record import read_records
from trainer.model_spec import WeightSource
from trainer.registry import add_working_directory_to_sys_path
from trainer.weights.adapters import BASE, export_adapter
from trainer.weights.exporting import MAX_FILE_BYTES, cast_weight, export, writing_safetensors
from trainer.weights.loading import build_meta_model, load_unsharded, with_merged_adapters
from trainer.weights.model_card import CARD_FILE, model_card
from trainer.weights.model_files import (
    TOKENIZER,
    ModelFiles,
    as_temporary_folder,
    is_tokenizer_file,
    tokenizer_settings,
)

METRICS = "metrics.jsonl"
_MERGED_ORIGINAL = "--merged-original"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_gb: float = MAX_FILE_BYTES / 1e9,
    overwrite: bool = False,
    allow_import: Collection[str] = (),
    merge: bool | Literal["original"] | None = None,
    base: str | None = None,
    ema: bool = False,
) -> list[Path]:
    """Write the weights of a checkpoint, or of the newest checkpoint of a run, to `target`; return the files written.

    A `target` ending in .pt or .safetensors is a plain state dict, which is built in memory; any adapters (LoRA) must
    be merged into it.  Any other target is a folder that `transformers` can load.  For a run with adapters, the folder
    contains only the adapters, in peft's format, unless they are merged.

    dtype: dtype of the exported weights; None for the stored dtypes.
    max_shard_gb: maximum size of a safetensors file in 10^9 bytes; larger models are split.  A file is held in memory
        while it is written.
    overwrite: whether to replace an earlier export.
    allow_import: modules that may be imported if the checkpoint names them (see `load_weights`).
    merge: whether to merge the adapters into the model.  If its base weights were quantized (`lora.base_dtype`), True
        merges into the dequantized weights, with which the adapters were trained, and "original" into the original,
        unquantized weights.  None is like False, but also allowed for a run without adapters.
    base: the new path of the base weights, if they have moved.
    ema: whether to export the averaged weights of a run with `train.ema`.

    Raises UserError for invalid arguments, if there is no checkpoint, if the base weights are missing or have changed,
    or if `target` cannot be written; TrainingFailed if the checkpoint is corrupt.
    """
    stored = open_checkpoint(checkpoint, ema)
    config = load_stored(stored.config_yaml, allow_import=allow_import)
    path = Path(target)
    model_files = ModelFiles.of_checkpoint(stored)
    if TOKENIZER in model_files.files and _was_trained_on_bytes(config):
        print_stderr(
            "warning: the run was trained on bytes: the tokenizer that came with its initial weights is left out"
        )
        model_files.files = {name: data for name, data in model_files.files.items() if not is_tokenizer_file(name)}
    is_file = path.suffix in (".pt", ".safetensors")
    has_adapters = config.lora.rank > 0
    if merge is False and not has_adapters:
        raise UserError(
            f"--adapter: {checkpoint} belongs to a run without adapters (lora.rank=0)\n  to fix: leave it out"
        )
    if has_adapters and not merge:
        if is_file:
            raise UserError(
                f"{path}: a single file can only hold a whole model\n  to fix: use --merged, or give a folder for "
                "the adapter"
            )
        return export_adapter(
            stored,
            config.spec,
            config.model,
            build_meta_model(config.spec, config.model),
            config.lora,
            path,
            base=repo_id_of(base or stored.parts.get(BASE, {}).get("path", "")),
            dtype=dtype,
            model_files=model_files,
            overwrite=overwrite,
            setting="target",
        )
    into_original = merge == "original"
    if into_original and not config.lora.packs:
        rule = f"the weights of {checkpoint} were not quantized (lora.base_dtype={config.lora.base_dtype})"
        raise UserError(f"--merged=original: {rule}\n  to fix: use --merged")
    source = with_merged_adapters(stored, config.spec, config.model, base, dtype, into_original)
    if is_file:
        return [_export_file(source, config, path, dtype, overwrite)]
    if TOKENIZER in model_files.tokenizer:  # the file that data.tokenizer names may no longer exist
        with as_temporary_folder(model_files.tokenizer) as folder:
            end_id = find_tokenizer(str(folder / TOKENIZER)).end_id
    else:
        end_id = find_tokenizer(config.data.tokenizer).end_id
    turn_ends: set[int] = set()
    if config.data.source == "chat":  # the model was trained to end its turns
        with tokenizer_settings(model_files, config.data.tokenizer) as (tokenizer, template):
            turn_ends = chat_stop_ids(tokenizer, template)
    return export(
        source,
        config.spec,
        config.model,
        path,
        dtype=dtype,
        max_shard_bytes=int(max_shard_gb * 1e9),
        tokenizer=config.data.tokenizer,
        end_id=end_id,
        turn_ends=turn_ends,
        model_files=model_files,
        overwrite=overwrite,
        setting="target",
    )


def _was_trained_on_bytes(config: RunConfig) -> bool:
    """Return whether the run was trained on bytes; for token shards, `data.tokenizer` alone does not tell."""
    if config.data.tokenizer != "bytes" or config.data.source == "synthetic":
        return False
    path = config.data.path
    paths = [*path.values()] if isinstance(path, Mapping) else [path]
    kinds = [kind_of(str(item)) for item in paths if item]
    is_text = any(kind is not None and kind[0] != "tokens" for kind in kinds)
    return config.data.source != "tokens" or is_text or allows_other_tokenizer(config)


def _export_file(
    source: WeightSource, config: RunConfig, path: Path, dtype: torch.dtype | None, overwrite: bool
) -> Path:
    if path.exists() and not overwrite:
        raise UserError(f"{path}: already exists; choose another name, or use --overwrite")
    model = build_meta_model(config.spec, config.model)
    model = load_unsharded(model, config.spec, source, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.data = cast_weight(parameter.data, dtype or source.dtypes.get(name, parameter.dtype), name)
    _write_state_dict(model if dtype is None else model.to(dtype), path)
    return path


def _write_state_dict(model: torch.nn.Module, path: Path) -> None:
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    with writing_to("target", path, num_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as partial:
            if path.suffix == ".pt":
                torch.save(model.state_dict(), partial)
            else:
                with writing_safetensors(partial):
                    safetensors.torch.save_model(model, str(partial), metadata={"format": "pt"})  # tied weights once


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or the folder or URL of a checkpoint")
    target = "a folder in Hugging Face format; or a file, *.pt or *.safetensors; not needed with --push"
    parser.add_argument("target", nargs="?", type=local_argument, help=target)
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="upload the export to the Hugging Face Hub, with a model card of the run"
    )
    parser.add_argument("--private", action="store_true", help="with --push: create a private repository")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as stored")
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=MAX_FILE_BYTES / 1e9,
        help="maximum size of one safetensors file, and of memory to write it (default: 2)",
    )
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument(
        "--merged", dest="merge", action="store_true", default=None, help="merge adapters into the weights"
    )
    adapters.add_argument(
        _MERGED_ORIGINAL,
        dest="merge",
        action="store_const",
        const="original",
        help="also --merged=original: merge adapters into the original, unquantized weights (lora.base_dtype=nf4 or "
        "fp8); --merged alone merges into the dequantized weights, with which the adapters were trained",
    )
    adapters.add_argument(
        "--adapter", dest="merge", action="store_false", default=None, help="export only the adapter (LoRA)"
    )
    parser.add_argument("--base", metavar="PATH", help="new folder of the adapters' base model, if it has moved")
    parser.add_argument("--ema", action="store_true", help="export the averaged weights of a run with train.ema")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_allow_import()
    arguments = sys.argv[1:] if argv is None else argv
    for item in arguments:
        if item.startswith("--merged=") and item != "--merged=original":
            parser.error(f"{item}: the only value is original: use --merged, or --merged=original")
    # If --merged took an optional value, argparse would parse the folder in `--merged FOLDER` as that value.
    options = parser.parse_args([_MERGED_ORIGINAL if item == "--merged=original" else item for item in arguments])
    add_working_directory_to_sys_path()
    return run_command(lambda: _export(options))


def _export(options: argparse.Namespace) -> int:
    if not 0 < options.max_shard_gb < math.inf:
        raise UserError(
            f"--max-shard-gb={options.max_shard_gb}: must be above 0 and finite\n  for example: --max-shard-gb=2"
        )
    if options.target is None and options.push is None:
        raise UserError("TARGET is missing\n  to fix: give a folder, or --push ORG/NAME")
    if options.push is not None and Path(options.target or "").suffix in (".pt", ".safetensors"):
        raise UserError(f"--push={options.push}: uploads a folder, not {options.target}\n  to fix: give a folder")
    with temporary_folder() as temporary:
        target = options.target or str(temporary / "export")
        files = export_checkpoint(
            options.checkpoint,
            target,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            max_shard_gb=options.max_shard_gb,
            overwrite=options.overwrite,
            allow_import=options.allow_import,
            merge=options.merge,
            base=options.base,
            ema=options.ema,
        )
        if options.push is not None:
            card = card_of(options.checkpoint, options.push.rpartition("/")[2], Path(target), options.allow_import)
            print_stdout(upload(Path(target), {CARD_FILE: card.encode()}, options.push, "--push", options.private))
    for file in files if options.target is not None else ():
        print_stdout(str(file))
    return EXIT_FINISHED


def card_of(checkpoint: str | os.PathLike[str], title: str, exported: Path, allow_import: Collection[str] = ()) -> str:
    """Return the model card (the text of README.md) for a run or checkpoint that was exported to `exported`."""
    stored = open_checkpoint(checkpoint)
    config = load_stored(stored.config_yaml, allow_import=allow_import)
    candidates = (Path(checkpoint) / METRICS, config.run_dir / METRICS)  # `checkpoint` may be a moved run folder
    metrics = next((file for file in candidates if file.is_file()), None)
    records = [] if metrics is None else [record for _, record in read_records(metrics)]
    return model_card(config, title, stored.manifest.step, records, __version__, exported)


if __name__ == "__main__":
    sys.exit(command_line())
