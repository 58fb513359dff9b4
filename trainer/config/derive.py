"""Computes the values of a configuration that follow from others, step by step (`derive`).

A run stores the results, so that its data and dtypes cannot change when it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainer import hub
from trainer.config.files import section_of
from trainer.config.keys import COMMAND_LINE, flat_values
from trainer.config.model_folder import stored_dtype
from trainer.config.requirements import likely_device
from trainer.config.schema import AUTO, MODEL, RunConfig
from trainer.config.weights import (
    allows_other_tokenizer,
    check_initial_weights,
    check_readable_tokenizer,
    check_same_tokenizer,
    find_weights_tokenizer,
    locate,
    resumed_run_config,
    will_resume,
)
from trainer.errors import setting_error


@dataclass
class Loaded:
    """A configuration, where its values come from, and what the user should know about it.

    origins: for each value that is not a default, the file that sets it, the command line, or "computed: REASON".
    notes: messages for the user.
    """

    config: RunConfig
    origins: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def apply(self, reason: str, step: Callable[[RunConfig], RunConfig]) -> None:
        """Replace the configuration with `step(config)`; `reason` is the origin of each value that this changes."""
        before = flat_values(self.config)
        self.config = step(self.config)
        after = flat_values(self.config)
        changed = [key for key, value in after.items() if key not in before or before[key] != value]
        self.origins |= dict.fromkeys(changed, f"computed: {reason}")

    def is_on_command_line(self, key: str) -> bool:
        return self.origins.get(key) == COMMAND_LINE


def with_section(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return the configuration with other values of some keys of a section."""
    return replace(config, **{section: replace(getattr(config, section), **values)})


def derive(loaded: Loaded, given: Mapping[str, Any], name: str, needs_weights: bool) -> None:
    """Compute the values that follow from others, from files, and from the machine.

    given: the values that layers set, by key, before `model.name=auto` was resolved.
    name: the name of the run, if no layer sets it.
    needs_weights: whether initial weights that cannot be read are an error.

    Raises UserError if a value cannot be computed, or contradicts one on the command line.
    """
    loaded.apply("from other model fields", model_fields)
    loaded.apply("the recipe's name", lambda config: run_name(config, name))
    loaded.apply("runs/NAME", run_folder)
    has_path = bool(loaded.config.data.path or loaded.config.data.eval_path)
    loaded.apply("data.path is given" if has_path else "no data.path is given", data_source)
    loaded.apply("what the name means today", lambda config: pinned_data(config, loaded.notes))
    loaded.apply("0.01 if an evaluation needs it, else 0", held_out_share)
    loaded.apply("train.objective reads labels", lambda config: with_section(config, "data", labels=labels_of(config)))
    loaded.apply("end if train.objective scores that", lambda config: target_position(config, loaded))
    loaded.apply("conversations do not attend to each other", lambda config: chat_packing(config, loaded))
    if not loaded.is_on_command_line("data.seq_len"):
        loaded.apply("the model's longest sequence", chat_length)
    loaded.apply(describe_auto_lr(loaded.config), auto_lr)
    loaded.apply("suits run.device", compute_dtype)
    loaded.apply("bfloat16 if the weights are stored so, else train.weights_dtype", adapter_base_dtype)
    loaded.apply("the file in the folder that is named", tokenizer_file)
    if needs_weights:
        check_initial_weights(loaded.config, given)
    loaded.apply("comes with the initial weights", lambda config: tokenizer_of_weights(config, loaded))


def model_fields(config: RunConfig) -> RunConfig:
    """Let the model spec compute the model fields that follow from others (`ModelSpec.resolve`)."""
    return config if config.spec.resolve is None else replace(config, model=config.spec.resolve(config.model))


def run_name(config: RunConfig, name: str) -> RunConfig:
    """Fill in the default name of the run."""
    return with_section(config, "run", name=config.run.name or name)


def run_folder(config: RunConfig) -> RunConfig:
    """Fill in the default folder of the run."""
    return with_section(config, "run", dir=config.run.dir or f"runs/{config.run.name}")


def data_source(config: RunConfig) -> RunConfig:
    """Resolve `data.source=auto`."""
    data = config.data
    if data.source != AUTO:
        return config
    return with_section(config, "data", source="tokens" if data.path or data.eval_path else "stdlib")


def pinned_data(config: RunConfig, notes: list[str]) -> RunConfig:
    """Replace the branches and tags of Hub datasets in `data.path` and `data.eval_path` with the commits they point to.

    A resumed run keeps the commits that it started with.  Appends to `notes` what the user should know.  Raises
    UserError as `hub.open_repository` does.
    """
    settings = {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    texts: dict[str, str] = {}
    for key, value in settings.items():
        sources = {f"{key}.{name}": text for name, text in value.items()} if isinstance(value, dict) else {key: value}
        texts |= {place: text for place, text in sources.items() if text and hub.is_hub_data(text)}
    parsed = {place: hub.parse_name(text) for place, text in texts.items()}
    names = {place: name for place, name in parsed.items() if name is not None and name.kind == "dataset"}
    if not names:
        return config
    kept_commits = hub.commits_of_run(resumed_run_config(config), names)

    def pin(place: str, text: str | None) -> str | None:
        if place not in names or names[place].is_pinned:
            return text
        commit = kept_commits.get(place)
        key = ".".join(place.split(".")[:2])
        if commit is not None:
            notes.append(f"{key}={text}: this run stays with commit {commit[:12]}, which it began with")
        return str(hub.open_repository(names[place], key, commit).name)

    def pin_all(key: str, value: str | dict[str, str] | None) -> str | dict[str, str | None] | None:
        if isinstance(value, dict):
            return {source: pin(f"{key}.{source}", text) for source, text in value.items()}
        return pin(key, value)

    pinned = {key.removeprefix("data."): pin_all(key, value) for key, value in settings.items()}
    return with_section(config, "data", **pinned)


def held_out_share(config: RunConfig) -> RunConfig:
    """Hold out 1% of the data for evaluation if `data.holdout` is unset and there is nothing else to evaluate on."""
    data = config.data
    if data.holdout is not None:
        return config
    evaluates = data.source in ("tokens", "chat") and config.eval.every > 0 and data.eval_path is None
    return with_section(config, "data", holdout=0.01 if evaluates else 0.0)


def labels_of(config: RunConfig) -> Literal["none", "read", "mismatched"]:
    """Return what the objective needs of the labels of chat records (`data.labels`).

    For an objective with labels and two rows per sample (KTO), each prompt is also paired with the response to another
    prompt.
    """
    if config.data.source != "chat" or "labels" not in config.objective.needs:
        return "none"
    return "mismatched" if config.objective.rows_per_sample == 2 else "read"


def target_position(config: RunConfig, loaded: Loaded) -> RunConfig:
    """Train on the end of each text if the objective scores it, and not otherwise."""
    data = config.data
    scores = "scores" in config.objective.needs
    if data.source != "chat" or scores == (data.train_on == "end"):
        return config
    train_on = "end" if scores else "assistant"
    if loaded.is_on_command_line("data.train_on"):
        trained = "scores the end of a text" if scores else "does not score texts at their end"
        rule = f"train.objective={config.train.objective} {trained}"
        raise setting_error("data.train_on", data.train_on, rule, train_on)
    return with_section(config, "data", train_on=train_on)


def chat_packing(config: RunConfig, loaded: Loaded) -> RunConfig:
    """Pack conversations without cutting them or letting them attend to each other."""
    data = config.data
    if data.source != "chat":
        return config
    if data.documents != "apart":
        return with_section(config, "data", documents="masked", fit="best")
    if loaded.is_on_command_line("data.fit"):
        return config
    return with_section(config, "data", fit="cut")  # of a run whose conversations were packed


def chat_length(config: RunConfig) -> RunConfig:
    """Limit the sequence length for chats to the maximum that the model supports."""
    longest = getattr(config.model, "max_seq_len", None)
    if config.data.source != "chat" or longest is None:
        return config
    return with_section(config, "data", seq_len=min(config.data.seq_len, longest))


_LR_AT_WIDTH_2000 = 5e-5
_LR_EXPONENT = 0.78
_LR_FACTOR_OF_ADAPTERS = 10


def auto_lr(config: RunConfig) -> RunConfig:
    """Resolve `optim.lr=auto` to a rate for fine-tuning, which falls with the model's width and is higher for adapters.

    The exponent was fitted to Llama models; for Qwen models the source gives a rate that hardly falls with width.
    Raises UserError if the model does not declare its width, `dim`.

    Source: Thinking Machines Lab, Tinker documentation, "Hyperparameters of supervised learning"; the factor of ten for
    adapters is from Schulman et al. 2025, "LoRA Without Regret".
    """
    if config.optim.lr != AUTO:
        return config
    width = getattr(config.model, "dim", None)
    if not width:
        rule = f"model.name={config.model.name} does not declare its width, dim"
        raise setting_error("optim.lr", AUTO, rule, _LR_AT_WIDTH_2000)
    lr = _LR_AT_WIDTH_2000 * (2000 / width) ** _LR_EXPONENT * (_LR_FACTOR_OF_ADAPTERS if config.lora.rank else 1)
    return with_section(config, "optim", lr=float(f"{lr:.2e}"))


def describe_auto_lr(config: RunConfig) -> str:
    """Return the formula of `auto_lr` for this model."""
    factor = f" x {_LR_FACTOR_OF_ADAPTERS} for adapters" if config.lora.rank else ""
    return f"{_LR_AT_WIDTH_2000:g} x (2000 / {getattr(config.model, 'dim', None)}) ** {_LR_EXPONENT}{factor}"


def compute_dtype(config: RunConfig) -> RunConfig:
    """Resolve `fsdp.param_dtype=auto`: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slow."""
    if config.fsdp.param_dtype != AUTO:
        return config
    has_gpu = likely_device(config.run.device) == "cuda"
    return with_section(config, "fsdp", param_dtype="bfloat16" if has_gpu else "float32")


def adapter_base_dtype(config: RunConfig) -> RunConfig:
    """Resolve `lora.base_dtype`: bfloat16 if the frozen weights are stored as bfloat16, else `train.weights_dtype`."""
    lora = config.lora
    source = config.train.init_from or config.model_path
    if not lora.rank or lora.base_dtype is not None:
        return config
    is_bfloat16 = source is not None and stored_dtype(source) == "bfloat16"
    return with_section(config, "lora", base_dtype="bfloat16" if is_bfloat16 else config.train.weights_dtype)


def tokenizer_file(config: RunConfig) -> RunConfig:
    """Replace `data.tokenizer=model`, or a folder, with the absolute path of the tokenizer.json.

    A resumed run thus finds the same file from any working directory.
    """
    tokenizer = config.data.tokenizer
    source = config.train.init_from
    if tokenizer == MODEL:  # the Hugging Face folder of the model, or of its initial weights
        has_folder = source is not None and locate(source).kind == "huggingface"
        tokenizer = config.model_path or (source if source is not None and has_folder else MODEL)
    if tokenizer != MODEL and (Path(tokenizer).expanduser() / "tokenizer.json").is_file():
        tokenizer = str((Path(tokenizer).expanduser() / "tokenizer.json").absolute())
    return with_section(config, "data", tokenizer=tokenizer)


def tokenizer_of_weights(config: RunConfig, loaded: Loaded) -> RunConfig:
    """Use the tokenizer of the initial weights, unless `data.tokenizer` is given.  A run that resumes keeps its own.

    Raises UserError if the given tokenizer differs from the weights' own, or if none is given and the weights' own
    cannot be read: token ids would then not mean what they meant when the weights were trained.
    `checkpoint.allow_changes=[data.tokenizer]` permits another tokenizer.
    """
    is_given = "data.tokenizer" in loaded.origins
    tokenizer = config.data.tokenizer
    if config.data.source == "synthetic":
        return config
    found = find_weights_tokenizer(config)
    resumes = will_resume(config)
    if is_given and tokenizer != MODEL:
        if found is not None and not allows_other_tokenizer(config) and not resumes:
            check_same_tokenizer(tokenizer, found)
        return config
    if found is None:
        if not is_given and not resumes:
            check_readable_tokenizer(config)
        return config
    previous = section_of(resumed_run_config(config), "data").get("tokenizer")
    if previous == "bytes" and not is_given:
        found = "bytes"
    return with_section(config, "data", tokenizer=found)
