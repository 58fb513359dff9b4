"""Defines, completes and validates the configuration of a transformers model.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainer.config.declare import declare
from trainer.config.model_folder import (
    CONFIG_JSON,
    check_readable,
    has_config_only,
    read_config,
    why_not_native,
)
from trainer.errors import UserError, setting_error


@dataclass(frozen=True)
class HfConfig:
    """The configuration of a model that transformers builds: its folder, its config.json, and a few settings."""

    path: str = declare(
        "",
        "Hugging Face model: a folder, org/name on the Hub, or a .gguf file",
        on_resume="free",
        training_only=True,
    )
    attention: Literal["sdpa", "eager", "flex", "flash_attention_2", "flash_attention_3"] | None = declare(
        None,
        "attention implementation; null: that in config.json, else sdpa if the model supports it",
        on_resume="free",
        training_only=True,
        aliases={"flex_attention": "flex", "flash": "flash_attention_2"},
    )
    fresh: bool = declare(
        False,
        "start from random weights; for a folder without weights, the default is true, except for fine-tuning (chats, "
        "preferences, LoRA)",
        on_resume="free",
        training_only=True,
    )
    config: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "the content of config.json; read from the folder, not a setting"}
    )

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary, or None if config.json does not specify it."""
        return self._entry("vocab_size")

    @property
    def dim(self) -> int | None:
        """Width of the residual stream, or None if config.json does not specify it."""
        return self._entry("n_embd", "hidden_size", "d_model")

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence that the position embeddings support, or None if config.json does not specify it."""
        return self._entry("n_positions", "max_position_embeddings")

    @property
    def num_experts(self) -> int | None:
        """Number of experts per layer, or None if config.json does not specify it."""
        return self._entry("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

    @property
    def num_chosen(self) -> int | None:
        """Number of experts that process each token, or None if config.json does not specify it."""
        return self._entry("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")

    def _entry(self, *names: str) -> Any:
        """Return the first nonzero entry among `names` in config.json, or else in its `text_config`; or None."""
        text_config = self.config.get("text_config") or {}
        return next(
            (entries[name] for entries in (self.config, text_config) for name in names if entries.get(name)), None
        )


def model_type(config: HfConfig) -> str:
    """Return transformers' `model_type`, for example "llama"."""
    return str(config.config.get("model_type"))


def resolve(config: HfConfig) -> HfConfig:
    """Return the configuration completed with the contents of the folder's config.json.

    `fresh` is also set if the folder has no weights.  A configuration written by a run already contains the entries of
    config.json, and is returned unchanged if the folder no longer has this file.

    Otherwise, raises UserError if no folder is given, or if config.json is missing or invalid or differs from the
    entries in the configuration.
    """
    folder = Path(config.path).expanduser().absolute()
    if not config.path or not (folder / CONFIG_JSON).is_file():
        if config.config:
            return config
        if not config.path:
            rule = "model.name=hf needs the folder of a Hugging Face model"
            raise setting_error("model.path", None, rule, proposal="models/Qwen3-8B")
    content = read_config(folder, "model.path")
    # `auto_map` names code in the folder, which is never run: transformers builds the model from its own code.
    try:
        check_readable({key: value for key, value in content.items() if key != "auto_map"})
    except UserError as error:
        raise setting_error("model.path", config.path, f"{CONFIG_JSON}: {error}") from error
    if config.config and config.config != content:
        changed_keys = [key for key in {**content, **config.config} if content.get(key) != config.config.get(key)]
        rule = f"{folder / CONFIG_JSON} differs from model.config: {', '.join(changed_keys)}"
        raise setting_error("model.path", config.path, rule, fix="set model.config={} to use the entries of the folder")
    fresh = config.fresh or has_config_only(folder)
    return replace(config, path=str(folder), fresh=fresh, config=content)


def check(config: HfConfig) -> None:
    """Raise UserError if transformers 5 or later is missing, or if the configuration was not read from a folder."""
    if not config.config:
        rule = "the model's config.json has not been read; use load_config"
        raise setting_error("model.path", config.path or None, rule, proposal="models/Qwen3-8B")
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        reason = why_not_native(config.config)
        rule = "needs the transformers library" + (f", because of {reason}" if reason else "")
        raise setting_error("model.name", "hf", rule, fix="pip install 'meshtrainer[transformers]'") from None
    if int(version.partition(".")[0]) < 5:
        rule = f"needs transformers 5 or later; {version} is installed: pip install 'meshtrainer[transformers]'"
        raise setting_error("model.name", "hf", rule)
