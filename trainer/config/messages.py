"""Error messages for mistakes in recipe files and arguments: unknown keys and options, and values of the wrong type.

Messages suggest the key or value that was probably meant, or say what to do.  The names that other trainers use for a
setting are recognized.  A key whose spelling is only vaguely similar is not suggested.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
import shlex
import sys
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from trainer.config.declare import union_members
from trainer.errors import UserError, as_argument, as_typed, nearest, setting_error

# ---------------------------------------------------------------------------------------------------------------
# Unknown keys, options and arguments

_OTHER_NAMES = {
    "optim.lr": "learning_rate base_lr max_lr peak_lr",
    "optim.name": "optim optimizer optimizer_type optimizer_name",
    "optim.betas": "adam_betas",
    "optim.eps": "epsilon adam_epsilon",
    "optim.max_grad_norm": "max_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm",
    "schedule.name": "schedule scheduler lr_scheduler lr_scheduler_type decay_type",
    "train.steps": "max_steps num_steps num_train_steps total_steps train_steps max_iters",
    "train.epochs": "num_epochs num_train_epochs max_epochs",
    "train.micro_batch_size": "local_batch_size per_device_train_batch_size per_device_batch_size train_batch_size "
    "batch_size micro_batch micro_bsz",
    "train.activation_checkpoint": "gradient_checkpointing activation_checkpointing recompute",
    "train.compile": "torch_compile compile_model compile_enable enable_compile",
    "train.init_from": "init_weights pretrained_model load_from initial_load_path",
    "train.freeze": "freeze_layers",
    "eval.every": "eval_steps eval_interval val_check_interval eval_every eval_freq",
    "eval.steps": "limit_val_batches eval_iters num_eval_steps max_eval_steps eval_max_steps",
    "eval.patience": "early_stopping_patience",
    "checkpoint.every": "checkpoint_steps save_steps save_interval save_every interval checkpoint_every "
    "every_n_train_steps",
    "checkpoint.keep_last": "save_total_limit save_top_k keep_latest_k",
    "checkpoint.resume": "resume_from_checkpoint resume_from ckpt_path resume load_step",
    "checkpoint.dir": "checkpoint_dir checkpoint_path save_dir save_folder",
    "log.every": "logging_steps log_steps log_every log_freq log_interval log_every_n_steps",
    "log.wandb": "use_wandb enable_wandb wandb_mode",
    "log.tensorboard": "enable_tensorboard use_tensorboard",
    "run.dir": "output_dir out_dir default_root_dir dump_folder logging_dir log_dir",
    "run.name": "run_name experiment_name exp_name run",
    "run.device": "device accelerator",
    "data.path": "data train_file data_path data_dir dataset dataset_path dataset_name datasets train_data",
    "data.eval_path": "validation_file eval_file val_path eval_data eval_dataset",
    "data.seq_len": "max_seq_length max_length block_size sequence_len sequence_length context_length seq_length",
    "data.num_workers": "dataloader_num_workers num_loader_workers",
    "data.tokenizer": "tokenizer tokenizer_path tokenizer_name hf_assets_path",
    "data.pack": "packing sample_packing",
    "data.holdout": "val_set_size",
    "data.chat_template": "chat_template chat_template_path",
    "model.name": "model model_type flavor",
    "model.path": "model_name_or_path model_path base_model pretrained_model_name_or_path hub_name",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target_modules target_modules",
    "mesh.shard": "mesh data_parallel_shard_degree dp_shard fsdp_size",
    "mesh.replicate": "data_parallel_replicate_degree dp_replicate",
    "mesh.context": "context_parallel_size context_parallel_degree cp_size",
    "mesh.expert": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "fsdp.cpu_offload": "offload_params enable_cpu_offload",
    "fsdp.reshard_after_forward": "fsdp fsdp_reshard_after_forward sharding_strategy fsdp_sharding_strategy",
    "fsdp.param_dtype": "dtype torch_dtype mixed_precision_param",
    "fsdp.reduce_dtype": "mixed_precision_reduce",
    "fsdp.wrap": "auto_wrap_policy fsdp_auto_wrap_policy",
    "nproc": "num_processes nproc_per_node nproc_per_gpu devices num_gpus n_gpus gpus ngpu",
    "recipe": "config config_file config_path job_config",
}
"""For each key, and for `nproc` and `recipe`, the names of the same setting in other trainers."""
_KEY_OF_NAME = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}

_COMPUTED = "it is computed from train.global_batch_size, train.micro_batch_size and the number of ranks"
_BY_LAUNCHER = "start the run with torchrun or srun, which set this"
_FSDP_ONLY = (
    "only sharding and replication are supported (mesh.shard, mesh.replicate; mesh.context for long sequences, "
    "mesh.expert for experts)"
)
_TRAINED_ON = "set data.train_on=assistant, or completion"
_EVAL_BATCH = "leave it out: evaluation uses train.micro_batch_size, like training"
_ADVICE_FOR_NAME = {  # settings of other trainers that do not correspond to a single key
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"), _COMPUTED),
    **dict.fromkeys(("bf16", "fp16", "precision", "mixed_precision", "amp"), "set fsdp.param_dtype=bfloat16"),
    **dict.fromkeys(("num_nodes", "num_machines", "nnodes", "nodes", "machine_rank", "node_rank"), _BY_LAUNCHER),
    **dict.fromkeys(("strategy", "distributed_type", "use_fsdp"), "leave it out: every run is sharded by FSDP2"),
    **dict.fromkeys(
        ("tensor_parallel_degree", "pipeline_parallel_degree", "tp_size", "pp_size", "deepspeed"), _FSDP_ONLY
    ),
    **dict.fromkeys(("train_on_inputs", "assistant_only_loss", "completion_only_loss"), _TRAINED_ON),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size", "micro_eval_batch_size"), _EVAL_BATCH),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "set eval.every, a number of steps; 0 means never"),
    "save_strategy": "set checkpoint.every, a number of steps",
    "load_best_model_at_end": "set checkpoint.keep_best=1; the best checkpoint is RUN/best",
    "model_name": "set model.path to a Hugging Face folder, or model.name to a registered model",
    "fsdp_transformer_layer_cls_to_wrap": "leave it out: fsdp.wrap=block, the default, wraps what the recipe lists",
    **dict.fromkeys(("adapter", "peft_config"), "set lora.rank, for example to 16"),
    "param_init_fn": "leave it out: each module initializes itself in reset_parameters()",
    "loss_type": "set train.objective, for example to ipo or kto",
    "rl": "use recipe=dpo, ipo, kto, simpo or orpo for preferences",
    "backward_prefetch": "set fsdp.prefetch_backward, for example to 2",
    "forward_prefetch": "set fsdp.prefetch_forward, for example to 2",
    "transformer_auto_wrap_policy": "leave it out: fsdp.wrap=block, the default, wraps the units that the recipe lists",
    "size_based_auto_wrap_policy": "set fsdp.wrap=size:100000000",
    "lambda_auto_wrap_policy": "set fsdp.wrap=my_package.my_module:function",
    "sync_module_states": "leave it out: each rank builds or loads its own shard",
    "fsdp_config": "set keys such as fsdp.wrap and mesh.shard, on the command line or in a recipe file",
    "report_to": "set log.trackers, for example to [wandb,tensorboard]",
    "warmup": "set schedule.warmup_steps, or schedule.warmup_ratio",
    "load_in_4bit": "set lora.base_dtype=nf4, with lora.rank=16",
    "load_in_8bit": "set lora.base_dtype=fp8, with lora.rank=16",
    "trust_remote_code": "leave it out: custom model code is never run",
}


def unknown_key_error(key: str, value: Any, legal: Collection[str], where: str = "", model: str = "") -> UserError:
    """Return the error for an unknown key.

    where: the file that contains the key, as text to append to the message; empty for the command line.
    model: the name of the model whose keys are in `legal`.
    """
    rule = f"no such key{where}"
    plain = key.translate(_STRAIGHT_QUOTES)
    if plain != key and plain in legal:  # copied from a page with typographic quotes
        fix = f"use plain quotes, or none: {plain}={str(value).translate(_STRAIGHT_QUOTES)}"
        return setting_error(key, value, rule, fix=fix)
    key_meant, advice = _guess_key(key, legal)
    if key_meant == key:  # a setting of other models only
        key_meant = None
        if key == "model.path":
            advice = f"train.init_from={value} loads a folder's weights; model.name=auto also takes its architecture"
    if advice:
        return setting_error(key, value, rule, fix=advice)
    if key_meant is None:
        section = key.partition(".")[0]
        fix = f"see python -m trainer.run --help{f' {section}' if _is_section(section, legal) else ''}"
        if section == "model" and model:
            rule = f"model.name={model} has no such setting{where}"
        return setting_error(key, value, rule, fix=fix)
    value_meant = _OTHER_VALUES.get(key_meant, {}).get(str(value).lower(), value)
    message = f"{setting_error(key, value, rule)}\n  did you mean {as_typed(key_meant, value_meant)}?"
    return UserError(message, as_argument(key_meant, value_meant))


_OTHER_VALUES = {
    "train.activation_checkpoint": {"true": "full", "false": "none"},
    "checkpoint.resume": {"true": "auto", "false": "none"},
    "fsdp.param_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "fsdp.reshard_after_forward": {"full_shard": "always", "shard_grad_op": "never"},
    "fsdp.wrap": {"transformer_based_wrap": "block"},
}
"""For each key, maps the values that other trainers use to ours."""


_STRAIGHT_QUOTES = str.maketrans("", "", "\u201c\u201d\u2018\u2019")
"""Removes the typographic quotes that word processors substitute for straight ones."""
DASHES = ("-", "\u2013", "\u2014")
"""The prefix of an option, and the dashes that word processors substitute for it."""
_ALWAYS_LEGAL = {"nproc", "recipe", "model.name", "model.path"}
_MODEL_SECTIONS = ("model.", "objective.")
"""Prefixes of the keys that depend on the model and the objective, and so are not known before a recipe is read."""
_KEY_OF_FULL_NAME = {"activation_checkpoint.mode": "train.activation_checkpoint", "checkpoint.folder": "checkpoint.dir"}


def _guess_key(key: str, legal: Collection[str]) -> tuple[str | None, str]:
    """Return the key that was probably meant, or else advice; (None, "") if there is neither."""
    if key in _KEY_OF_FULL_NAME:
        return _KEY_OF_FULL_NAME[key], ""
    section, _, leaf = key.rpartition(".")
    leaf = leaf.replace("-", "_").lower()
    if section == "trainer" and leaf in _KEY_OF_NAME:
        return _KEY_OF_NAME[leaf], ""
    leaves = {legal_key.partition(".")[2]: legal_key for legal_key in legal}
    joined = f"{section}_{leaf}"
    if joined in _ADVICE_FOR_NAME:
        return None, _ADVICE_FOR_NAME[joined]
    if key_named := leaves.get(joined) or _KEY_OF_NAME.get(joined):
        return key_named, ""
    is_section = _is_section(section, legal)
    same_name = [legal_key for legal_key in legal if legal_key.partition(".")[2] == leaf]
    is_unambiguous = not is_section or leaf in _UNAMBIGUOUS_KEYS or ("_" in leaf and len(same_name) == 1)
    if same_name and is_unambiguous and (section or leaf not in _KEY_OF_NAME):
        return max(same_name, key=lambda k: difflib.SequenceMatcher(None, section, k.partition(".")[0]).ratio()), ""
    if leaf in _ADVICE_FOR_NAME:
        return None, _ADVICE_FOR_NAME[leaf]
    if (key_named := _KEY_OF_NAME.get(leaf)) in {*legal, *_ALWAYS_LEGAL} and (
        section != "eval" or str(key_named).startswith(_EVAL_PREFIXES)
    ):
        return key_named, ""
    keys_of_section = [legal_key for legal_key in legal if legal_key.partition(".")[0] == section and not same_name]
    similar = difflib.get_close_matches(
        leaf, [legal_key.partition(".")[2] for legal_key in keys_of_section], n=1, cutoff=0.75
    )
    if similar:
        return f"{section}.{similar[0]}", ""
    similar = [] if is_section else difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.85)
    return (leaves[similar[0]], "") if similar else (None, "")


_UNAMBIGUOUS_KEYS = ("seed", "lr", "betas", "epochs")
"""Keys whose meaning does not depend on the section, unlike `path` or `steps`."""
_EVAL_PREFIXES = ("eval.", "data.eval_path", "data.holdout")
"""Prefixes of the keys that may be suggested for a name in the section `eval`; a training key would be misleading."""


def _is_section(name: str, legal: Collection[str]) -> bool:
    return any(legal_key.startswith(f"{name}.") for legal_key in legal)


def unknown_option_error(option: str, options: Iterable[str], keys: Collection[str] = ()) -> UserError:
    """Return the error for an argument that begins with a dash but is not an option."""
    name, equals, value = option.lstrip("".join(DASHES)).partition("=")
    value = value if equals else "..."

    def error(advice: str, key: str) -> UserError:
        return UserError(f"{option}: no such option\n  {advice}", f"{key}={value}" if equals else "")

    if name in ("recipe", "nproc"):
        return error(f"did you mean {name}={value}?", name)
    key_meant, advice_for_name = _guess_key(name, keys)
    if advice_for_name:
        return UserError(f"{option}: no such option\n  to fix: {advice_for_name}")
    if name in keys or (key_meant in (None, name) and name.startswith(_MODEL_SECTIONS)):
        return error(f"to fix: keys are written without dashes, as {name}={value}", name)
    if key_meant is not None:
        return error(f"did you mean {key_meant}={value}?", key_meant)
    similar = difflib.get_close_matches(name, [each.lstrip("-") for each in options], n=1, cutoff=0.7)
    if similar:
        return UserError(f"{option}: no such option\n  did you mean --{similar[0]}?", f"--{similar[0]}")
    return UserError(f"{option}: no such option\n  to fix: see --help")


def unexpected_argument_error(
    argv: Sequence[str], index: int, recipes: Collection[str], has_recipe: bool, options: Collection[str] = ()
) -> UserError:
    """Return the error for the argument at index `index`, which is not of the form key=value."""
    word, before = argv[index], argv[index - 1] if index else ""
    rule = f"{word!r}: an argument has the form section.key=value"
    after = list(argv[index + 1 : index + 3])
    if after[:1] == ["="]:
        proposal = f"{word}={after[1]}" if after[1:] else ""
        return UserError(f"{rule}\n  to fix: write it without spaces: {proposal or f'{word}=...'}", proposal)
    if before.endswith("="):
        return UserError(f"{rule}\n  to fix: write it without spaces: {before}{word}", f"{before}{word}")
    if (not has_recipe and (meant := nearest(word, recipes)) and "." not in word) or (meant := word) in recipes:
        return UserError(f"{rule}\n  did you mean recipe={meant}?", f"recipe={meant}")
    similar = difflib.get_close_matches(f"--{word.replace('_', '-')}", options, n=1, cutoff=0.85)
    if similar:
        return UserError(f"{rule}\n  did you mean {similar[0]}?", similar[0])
    key, colon, value = word.partition(":")
    if colon and value and _is_key(key):
        return UserError(f"{rule}\n  did you mean {as_typed(key, value)}?", as_argument(key, value))
    # This may be part of an unquoted value with spaces, unless that value is a recipe, nproc or a number.
    name, equals, start = before.partition("=")
    may_have_spaces = equals and name not in ("recipe", "nproc") and not re.fullmatch(r"[-+\d.,_e]+", start)
    if may_have_spaces and not word.startswith("=") and not _is_key(word):
        words_left = itertools.takewhile(lambda each: "=" not in each and not each.startswith(DASHES), argv[index:])
        argument = " ".join([before, *words_left])
        return UserError(f"{rule}\n  to fix: quote a value with spaces in it: {shlex.quote(argument)}", argument)
    example = f"{word if _is_key(word) else 'train.steps'}=100"
    return UserError(f"{rule}\n  for example: {example}", example)


def _is_key(word: str) -> bool:
    return word.count(".") == 1 and word.replace(".", "").replace("_", "").isalnum()


# ---------------------------------------------------------------------------------------------------------------
# Values of the wrong type
#
# The suffix of a key gives the unit of its number: `_s` means seconds, `_h` hours, and `_gib` GiB.


def type_name(hint: Any) -> str:
    """Return a type in words, as error messages and `--help` show it."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "a value",
    }
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        return "{name: " + ("..." if value is Any else type_name(value)) + "}"
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        several = {int: "whole numbers", float: "numbers"}.get(items[0])
        if Ellipsis in items:
            return f"a list of {several or type_name(items[0])}"
        return f"a list of {len(items)} {several or f'x {type_name(items[0])}'}"
    options = union_members(hint)
    if len(options) > 1:
        return " or ".join(type_name(option) for option in options)
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def example_value(key: dataclasses.Field[Any]) -> Any:
    """Return an example value for a key, or None."""
    default = None if key.default is dataclasses.MISSING else key.default
    return _EXAMPLES.get(key.name, default)


_BOOLEAN_WORDS = {
    **dict.fromkeys(("y", "t", "1", "enable", "enabled"), True),
    **dict.fromkeys(("n", "f", "0", "disable", "disabled", "none"), False),
}


def suggest_value(value: Any, hint: Any, key: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the keyword arguments of `setting_error` (`proposal`) for a value of the wrong type."""
    options = union_members(hint)
    if int in options and isinstance(value, (float, bool)) and math.isfinite(value):
        return {"proposal": max(round(value), key.metadata.get("at_least", -math.inf))}
    if bool in options:
        meant = _BOOLEAN_WORDS.get(str(value).lower(), nearest(value, ("true", "false")))
        return {"proposal": bool(value) if isinstance(value, int) else meant}
    default = None if key.default is dataclasses.MISSING else key.default
    for items in (typing.get_args(option) for option in options if typing.get_origin(option) is tuple):
        items_given = value if isinstance(value, list) else [value]
        if items[0] is str and isinstance(value, str):
            is_all = value.lower() in _WORDS_FOR_ALL and key.name in _EXAMPLES
            return {"proposal": _EXAMPLES[key.name]} if is_all else {"proposal": items_given}
        numbers = [
            round(n) if items[0] is int else n
            for n in items_given
            if isinstance(n, (int, float)) and abs(n) <= sys.float_info.max
        ]
        if numbers and items[0] in (int, float):
            defaults = list(default or numbers[-1:] * len(items))[len(numbers) :]
            return {"proposal": numbers if Ellipsis in items else (numbers + defaults)[: len(items)]}
    if float in options or int in options:
        number = _parse_number(str(value), key.name)
        if number is None or not (float in options or number.is_integer()):
            return {"proposal": example_value(key)}
        return {"proposal": int(number) if number.is_integer() else number}
    for values in (typing.get_args(option)[1] for option in options if typing.get_origin(option) is dict):
        if (meant := _parse_unspaced_mapping(value)) is not None and values is str:
            return {"proposal": meant}
        form = {"a": "a.jsonl", "b": "b/*.bin"} if values is str else {"a": 0.7, "b": 0.3}
        return {"proposal": _EXAMPLES.get(key.name, form) if default is None else default}
    return {"proposal": example_value(key)}


def _parse_unspaced_mapping(value: Any) -> dict[str, str] | None:
    """Return the mapping in {a:b, c:d}, which lacks the space that YAML requires after a colon; None for other text."""
    if isinstance(value, dict):
        items = [str(name) for name, item_value in value.items() if item_value is None]
        if len(items) < len(value):
            return None
    else:
        items = [item.strip() for item in str(value).strip().strip("{}").split(",")]
    matches = [re.fullmatch(r"([^:\s]+):\s*([^:\s]+)", item) for item in items]
    return {item[1]: item[2] for item in matches if item} if matches and all(matches) else None


_EXAMPLES = {
    "columns": {"messages": "dialog"},
    "profile_steps": [10, 13],
    "phases": [{"from": "80%", "weights": {"a": 0.7, "b": 0.3}}],
    "every": 100,
    "warmup_steps": 100,
    "warmup_ratio": 0.03,
    "ema": 0.999,
    "allow_changes": ["optim.name"],
}
"""Example values for keys whose default is empty or disables the feature."""

_WORDS_FOR_ALL = ("all", "any", "*", "true", "yes")
"""What users write to mean every entry of a list."""

_COUNT_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "%": 0.01}
_MINUTES = ("m", "min", "mins", "minutes")
_UNITS = {
    "s": {
        "ms": 1e-3,
        **dict.fromkeys(("", "s", "sec", "seconds"), 1.0),
        **dict.fromkeys(_MINUTES, 60.0),
        **dict.fromkeys(("h", "hours"), 3600.0),
        **dict.fromkeys(("d", "days"), 86400.0),
    },
    "h": {**dict.fromkeys(("", "h", "hours"), 1.0), **dict.fromkeys(_MINUTES, 1 / 60), "d": 24.0, "days": 24.0},
    "gib": {
        **dict.fromkeys(("m", "mb", "mib"), 1 / 1024),
        **dict.fromkeys(("", "g", "gb", "gib"), 1.0),
        **dict.fromkeys(("t", "tb", "tib"), 1024.0),
    },
}
"""For each suffix of a key: the accepted units, and the size of each in the unit of the key."""


def _parse_number(text: str, name: str) -> float | None:
    """Parse a number such as 10k, 1,000 steps, 0,5 or, for a key in seconds, 30m; return None for other text."""
    if re.fullmatch(r"[+-]?(0,\d+|\d+,(\d{1,2}|\d{4,}))", text):
        text = text.replace(",", ".")
    match = re.fullmatch(
        r"([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([a-z%]*)", re.sub(r",(?=\d{3})", "", text.strip().lower())
    )
    if match is None:
        return None
    units, unit = _UNITS.get(name.rpartition("_")[2]), match[2]
    factor = (units or _COUNT_SUFFIXES).get(unit)
    if factor is None and (units or any(unit in others for others in _UNITS.values())):
        return None  # for example a unit of time for a key that counts steps
    factor = 1.0 if factor is None else factor
    try:
        number = round(float(match[1]) * factor, 12)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
