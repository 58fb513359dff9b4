"""Builds the model card of an export: the run's data, settings and losses, and the license of its base model.

The card is made from the run's configuration and metrics, the exported files, and the base model's README.md.  Local
paths are shortened to their last part, since a card is public.  Format: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import hub
from trainer.config.schema import RunConfig, name_of_source
from trainer.files import read_json

CARD_FILE = "README.md"

_SETTINGS = (
    *("optim.name", "optim.lr", "optim.weight_decay", "schedule.name", "schedule.warmup_steps"),
    *("train.global_batch_size", "data.seq_len", "lora.rank", "lora.alpha", "train.weights_dtype", "run.seed"),
)
"""Keys of the settings that a card lists."""


def model_card(
    config: RunConfig, title: str, step: int, records: Sequence[Mapping[str, Any]], version: str, exported: Path
) -> str:
    """Return the text of README.md for a model that was trained with `config` for `step` steps.

    records: the run's `train` and `eval` records; may be empty.
    version: the version of meshtrainer.
    exported: the folder of the export, whose files show whether the model is an adapter or a classifier.
    """
    base = config.train.init_from or config.model_path
    base_name = None if base is None else _public_name(name_of_source(base))
    license_name = None if base is None else license_of(base)
    adapter, model = _read_object(exported / "adapter_config.json"), _read_object(exported / "config.json")
    is_adapter = bool(adapter)
    is_classifier = adapter.get("task_type") == "SEQ_CLS" or any(
        name.endswith("ForSequenceClassification") for name in model.get("architectures") or []
    )
    front_matter: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["meshtrainer"]}
    front_matter |= {"pipeline_tag": "text-classification" if is_classifier else "text-generation"}
    if license_name is not None:
        front_matter["license"] = license_name
    if base is not None and (name := hub.parse_name(name_of_source(base))) is not None:
        front_matter |= {"base_model": name.repo, "base_model_relation": "adapter" if is_adapter else "finetune"}
    datasets = [name.repo for path in _data_paths(config) if (name := hub.parse_name(path)) and name.kind == "dataset"]
    if datasets:
        front_matter["datasets"] = list(dict.fromkeys(datasets))
    counts = [each["tokens"] for each in records if each.get("kind") == "train" and each.get("step", 0) <= step]
    kind = f"LoRA adapter (rank {config.lora.rank})" if is_adapter else "model"
    origin = f"fine-tuned from {base_name}" if base_name else "trained from random weights"
    lines = [
        *("---", *(f"{key}: {json.dumps(value)}" for key, value in front_matter.items()), "---", ""),
        *(f"# {title}", "", f"A {config.model.name} {kind}, {origin} with meshtrainer {version}.", ""),
        *("## Data", "", *(f"- {_public_name(path)}" for path in _data_paths(config) or [config.data.source]), ""),
        *("## Training", "", f"{step:,} steps{f' on {counts[-1]:,} tokens' if counts else ''}.", ""),
        *("| setting | value |", "|---|---|"),
        *(f"| `{key}` | {value} |" for key, value in _settings(config)),
        *("", "## Losses", "", *_losses(records, step), ""),
    ]
    if base_name:
        unknown = "The base model does not state a license; ask its authors before you use or share this model"
        statement = f"That license is {license_name}" if license_name else unknown
        lines += ["## License", "", f"The license of {base_name} applies to models derived from it. {statement}.", ""]
    return "\n".join(lines)


def _read_object(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def license_of(base: str) -> str | None:
    """Return the license that the README.md of a model folder declares, or None."""
    try:
        text = (Path(base.removeprefix("file://")) / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front_matter = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    match = re.search(r"^license:\s*['\"]?([\w.-]+)", front_matter[1], re.MULTILINE) if front_matter else None
    return match[1] if match else None


def _data_paths(config: RunConfig) -> list[str]:
    path = config.data.path
    return [] if path is None else [path] if isinstance(path, str) else list(path.values())


def _public_name(path: str) -> str:
    """Return a path without private parts: a URL or Hub name without its query, or the last part of a local path."""
    return path.partition("?")[0] if "://" in path else path.rstrip("/").rpartition("/")[2]


def _settings(config: RunConfig) -> list[tuple[str, Any]]:
    plain = config.to_dict()
    values = [(key, plain[key.partition(".")[0]].get(key.partition(".")[2])) for key in _SETTINGS]
    shown = [(key, value) for key, value in values if value is not None]
    return [(key, value) for key, value in shown if config.lora.rank or not key.startswith("lora.")]


def _losses(records: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    rows = []
    for kind, name in (("train", "training"), ("eval", "evaluation")):
        matching = [each for each in records if each.get("kind") == kind and each.get("step", 0) <= step]
        matching = [each for each in matching if isinstance(each.get("loss"), (int, float))]
        ends = matching if len(matching) < 2 else [matching[0], matching[-1]]
        rows += [f"| {name} | {each['step']:,} | {each['loss']:.4f} |" for each in ends]
    return ["| | step | loss |", "|---|---|---|", *rows] if rows else ["The run's metrics were not available."]
