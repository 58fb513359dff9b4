"""Finds out which kinds of model and features work together, by training tiny models for two steps on two ranks.

    python -m tests.compatibility            # try all pairs and print what does not work
    python -m tests.compatibility --write    # also write docs/compatibility.md

Each kind of model is tried with each feature, and each pair of features on a Llama, or on a Qwen3-MoE if one of them
concerns experts.  Each attempt builds a Trainer from a configuration, as any run does, and trains two steps.  If the
configuration is rejected, the first line of the message is recorded.  `train.compile` uses the backend aot_eager, which
traces like the default and generates no machine code; float8 is emulated.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.helpers.ranks import merged, run_ranks
from trainer import RunConfig, Trainer, UserError, load_config
from trainer.errors import PeerFailed

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "compatibility.md"
NUM_STEPS = 2
"""The loss of the second step depends on the update of the first one."""
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


@dataclass(frozen=True)
class Kind:
    """A kind of model: its title on the page, and its tiny shape."""

    title: str
    fields: tuple[str, ...] = ()
    """For a native recipe: overrides."""
    transformers_model: str = ""
    """For `model.name=hf`: the name of the model in tests/helpers/hf_models.py."""
    changes: tuple[tuple[str, Any], ...] = ()
    """For `model.name=hf`: changes to that model's settings."""


_HEADS = ("model.num_layers=2", "model.num_heads=4", "model.dim=64", "model.init_std=0.1", "model.vocab_size=257")
_GROUPED = (*_HEADS, "model.num_kv_heads=2")
_EXPERTS = ("model.expert_dim=64", "model.num_experts=4", "model.num_chosen=2")
_WIDE = (("hidden_size", 64), ("intermediate_size", 128))
KINDS = {
    "llama": Kind("Llama", (*_GROUPED, "model.ffn_dim=128")),
    "gpt2": Kind("GPT-2", (*_HEADS, "model.max_seq_len=64")),
    "qwen3": Kind("Qwen3", (*_GROUPED, "model.head_dim=16", "model.ffn_dim=128")),
    "qwen3_moe": Kind("Qwen3-MoE", (*_GROUPED, *_EXPERTS, "model.head_dim=16")),
    "qwen3_next": Kind(
        "Qwen3-Next",
        (
            *(*_GROUPED, *_EXPERTS, "model.head_dim=16", "model.rotary_dim=8", "model.shared_dim=64"),
            *("model.attention_every=2", "model.delta_heads=4", "model.delta_key_heads=2"),
            *("model.delta_key_dim=16", "model.delta_value_dim=16"),
        ),
    ),
    "gpt_oss": Kind("gpt-oss", (*_GROUPED, *_EXPERTS, "model.head_dim=16", "model.window=16")),
    "deepseek_v3": Kind(
        "DeepSeek-V3",
        (
            *(*_HEADS, *_EXPERTS, "model.num_dense_layers=1", "model.ffn_dim=128", "model.num_groups=2"),
            *("model.num_chosen_groups=1", "model.q_rank=64", "model.kv_rank=64", "model.nope_dim=8"),
            *("model.rope_dim=8", "model.value_dim=16", "model.balance_rate=0"),
        ),
    ),
    "hf_dense": Kind("hf: dense", transformers_model="llama", changes=_WIDE),
    "hf_mixture": Kind("hf: mixture", transformers_model="qwen3_moe", changes=(*_WIDE, ("moe_intermediate_size", 64))),
    "hf_hybrid": Kind(
        "hf: hybrid",
        transformers_model="qwen3_next",
        changes=(
            *(*_WIDE, ("num_hidden_layers", 4), ("moe_intermediate_size", 64)),
            *(("shared_expert_intermediate_size", 64), ("linear_key_head_dim", 16), ("linear_value_head_dim", 16)),
        ),
    ),
}
"""Widths are multiples of 64, so that base weights can be packed.  The models of transformers are a Llama, a Qwen3-MoE
and a Qwen3-Next."""


@dataclass(frozen=True)
class Feature:
    """A feature: its title on the page, the header of its column, and the overrides that enable it."""

    title: str
    head: str
    overrides: tuple[str, ...]
    """`{folder}` is the folder of the data, `{weights}` that of the kind's weights in Hugging Face's format."""
    needs_weights: bool = False
    concerns_experts: bool = False


_LORA = ("lora.rank=4",)


def _objective(name: str, file: str, *more: str) -> tuple[str, ...]:
    data = ("data.source=chat", f"data.path={{folder}}/{file}.jsonl", "data.tokenizer={folder}/tokenizer")
    return (f"train.objective={name}", *data, *more)


FEATURES = {
    "masked": Feature("Masked documents: `data.documents=masked`", "masked", ("data.documents=masked",)),
    "replicate": Feature("Replicas: `mesh.replicate=2`", "replicas", ("mesh.replicate=2",)),
    "context": Feature("Split sequences: `mesh.context=2`", "context", ("mesh.context=2",)),
    "exchange": Feature(
        "Divided experts, tokens exchanged: `mesh.expert=2 mesh.expert_method=exchange`",
        "expert exchange",
        ("mesh.expert=2", "mesh.expert_method=exchange"),
        concerns_experts=True,
    ),
    "gather": Feature(
        "Divided experts, tokens gathered: `mesh.expert=2 mesh.expert_method=gather`",
        "expert gather",
        ("mesh.expert=2", "mesh.expert_method=gather"),
        concerns_experts=True,
    ),
    "lora": Feature("Adapters: `lora.rank=4`", "LoRA", _LORA, needs_weights=True),
    "lora_experts": Feature(
        "Adapters of stacked experts: `lora.rank=4 lora.targets=[experts]`",
        "LoRA experts",
        (*_LORA, "lora.targets=[experts]"),
        needs_weights=True,
        concerns_experts=True,
    ),
    "nf4": Feature(
        "Base in 4 bits: `lora.rank=4 lora.base_dtype=nf4`", "nf4", (*_LORA, "lora.base_dtype=nf4"), needs_weights=True
    ),
    "fp8": Feature(
        "Base in 8 bits: `lora.rank=4 lora.base_dtype=fp8`", "fp8", (*_LORA, "lora.base_dtype=fp8"), needs_weights=True
    ),
    "full": Feature("Recomputation: `train.activation_checkpoint=full`", "full", ("train.activation_checkpoint=full",)),
    "selective": Feature(
        "In part: `train.activation_checkpoint=selective`", "selective", ("train.activation_checkpoint=selective",)
    ),
    "budget": Feature(
        "By a budget: `train.activation_checkpoint=budget:0.5`", "budget", ("train.activation_checkpoint=budget:0.5",)
    ),
    "compile": Feature("Compiled blocks: `train.compile=true`", "compile", ("train.compile=true",)),
    "cpu_offload": Feature(
        "Parameters on the host: `fsdp.cpu_offload=true`", "cpu offload", ("fsdp.cpu_offload=true",)
    ),
    "activations": Feature(
        "Activations on the host: `train.offload_activations=1.0`", "activations", ("train.offload_activations=1.0",)
    ),
    "float8": Feature(
        "Float8: `train.float8=rowwise fsdp.param_dtype=bfloat16`",
        "float8",
        ("train.float8=rowwise", "fsdp.param_dtype=bfloat16"),
    ),
    "muon": Feature("Muon: `optim.name=muon`", "Muon", ("optim.name=muon",)),
    "int8": Feature("Moments in 8 bits: `optim.state_dtype=int8`", "8-bit", ("optim.state_dtype=int8",)),
    "ema": Feature("Averaged weights: `train.ema=0.9`", "EMA", ("train.ema=0.9",)),
    "sharded": Feature("Sharded accumulation: `fsdp.accumulate=sharded`", "sharded", ("fsdp.accumulate=sharded",)),
    "dpo": Feature("`train.objective=dpo`", "dpo", _objective("dpo", "pairs"), needs_weights=True),
    "kto": Feature("`train.objective=kto`", "kto", _objective("kto", "labelled"), needs_weights=True),
    "reward": Feature("`train.objective=reward`", "reward", _objective("reward", "pairs"), needs_weights=True),
    "classify": Feature(
        "`train.objective=classify`",
        "classify",
        _objective("classify", "classes", "objective.num_labels=2"),
        needs_weights=True,
    ),
    "distill": Feature(
        "`train.objective=distill`",
        "distill",
        ("train.objective=distill", "objective.teacher={weights}"),
        needs_weights=True,
    ),
}

BASE = (
    *("data.source=tokens", "data.path={folder}/documents.jsonl", "data.cache_dir={folder}/cache", "data.seq_len=64"),
    *("train.steps=3", "train.global_batch_size=4", "train.micro_batch_size=1", "train.compile=false"),
    *("eval.every=0", "checkpoint.every=0", "log.sample_tokens=0", "schedule.warmup_steps=0", "run.threads=1"),
    *("run.device=cpu", "run.timeout_s=120"),
)
"""The settings of all attempts; features override some of them."""

WORKS = "works"


@dataclass(frozen=True)
class Pair:
    """A combination to try: a kind of model and one or two features."""

    kind: str
    features: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """The overrides of the features."""
        return [item for name in self.features for item in FEATURES[name].overrides]

    @property
    def num_ranks(self) -> int:
        """Two, or four for replicas whose ranks split sequences or divide experts."""
        splits = {"context", "exchange", "gather"} & {*self.features}
        return 4 if "replicate" in self.features and splits else 2

    @property
    def has_conflict(self) -> bool:
        """Whether the features set the same key to different values."""
        return len(set(self.overrides)) != len({item.partition("=")[0] for item in self.overrides})


def pairs_of_kinds(features: Sequence[str]) -> list[Pair]:
    """Return each kind with each feature."""
    return [Pair(kind, (feature,)) for kind in KINDS for feature in features]


def kind_for(features: Sequence[str]) -> str:
    """Return the kind of model on which two features are tried."""
    return "qwen3_moe" if any(FEATURES[name].concerns_experts for name in features) else "llama"


def pairs_of_features(features: Sequence[str]) -> list[Pair]:
    """Return each pair of features that can be set together, with the kind on which it is tried."""
    found = [Pair(kind_for(both), both) for both in itertools.combinations(features, 2)]
    return [pair for pair in found if not pair.has_conflict]


def available_features() -> list[str]:
    """Return the names of the features that can be tried with the installed packages: float8 needs torchao."""
    return [name for name in FEATURES if name != "float8" or HAS_TORCHAO]


# ---------------------------------------------------------------------------------------------------------------
# Data and weights


def write_data(folder: Path) -> None:
    """Write documents, preference pairs, labelled answers, labelled texts, and the tokenizer of chats."""
    from tests.helpers.chats import CHATML, write_tokenizer

    words = ["Hi", "Yes", "No", "two", "four", "Bye"]

    def text(number: int) -> str:
        return " ".join(words[(number + k) % 6] for k in range(1 + number % 5))

    numbers = range(40)
    prompts, answers = [text(3 * number) for number in numbers], [text(number) for number in numbers]
    contents: dict[str, list[dict[str, Any]]] = {
        "documents": [{"text": f"{number}: {text(number)}. " * (1 + number % 3)} for number in range(400)],
        "pairs": [
            {"prompt": prompts[n], "chosen": answers[n], "rejected": answers[(n + 1) % len(answers)]} for n in numbers
        ],
        "labelled": [{"prompt": prompts[n], "completion": answers[n], "label": n % 3 != 0} for n in numbers],
        "classes": [{"text": answers[n], "label": n % 2} for n in numbers],
    }
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokenizer(folder / "tokenizer", CHATML)


def write_weights(name: str, folder: Path) -> None:
    """Write weights of a kind into `folder`, in Hugging Face's format."""
    from tests.helpers import hf_models
    from tests.weights.test_huggingface import Memory, build
    from trainer.recipe import find_recipe
    from trainer.weights.exporting import export

    kind = KINDS[name]
    if kind.transformers_model:
        hf_models.folder_of(folder, kind.transformers_model, **dict(kind.changes))
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer_config.json").unlink()
        return
    model = load_config("llama_small", [f"model.name={name}", *kind.fields]).model
    recipe = find_recipe(name)
    export(Memory(build(recipe, model).state_dict()), recipe, model, folder)


def prepare(folder: Path, kinds: Iterable[str] = tuple(KINDS)) -> None:
    """Write the data, and the weights of these kinds, that attempts read."""
    write_data(folder)
    for kind in kinds:
        write_weights(kind, folder / "weights" / kind)


# ---------------------------------------------------------------------------------------------------------------
# Attempts


def config_of(pair: Pair, folder: Path) -> RunConfig:
    """Return the configuration of an attempt.  `folder` is the one that `prepare` has filled.  Raises UserError."""
    weights = folder / "weights" / pair.kind
    own = list(dict.fromkeys(pair.overrides))
    if KINDS[pair.kind].transformers_model:
        model = ["model.name=hf", f"model.path={weights}"]
    elif any(FEATURES[name].needs_weights for name in pair.features):
        model = [f"model.name={pair.kind}", f"train.init_from={weights}"]
    else:
        model = [f"model.name={pair.kind}", *KINDS[pair.kind].fields]
    run = f"run.dir={folder}/runs/{pair.kind}-{'-'.join(pair.features)}"
    items = [item.format(folder=folder, weights=weights) for item in merged([*BASE], own)]
    return load_config("llama_small", [*model, *items, run])


def first_line(error: BaseException, folder: Path) -> str:
    """Return the first line of an error message, without the temporary folder."""
    return str(error).splitlines()[0].replace(str(folder), "FOLDER")


@contextmanager
def quick_kernels() -> Iterator[None]:
    """Compile without generating code, and emulate float8 matmuls, inside the block."""
    from trainer.model.float8 import apply_float8

    emulated = functools.partial(apply_float8, emulate=True)
    with ExitStack() as patches:
        patches.enter_context(mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")))
        patches.enter_context(mock.patch("trainer.model.shard.apply_float8", emulated))
        yield


def attempt(pair: Pair, folder: Path) -> str:
    """Train two steps on this rank; return `WORKS`, the message of a rejection, or a defect, which begins with `!`."""
    trainer = None
    try:
        config = config_of(pair, folder)
        trainer = config.trainer_class(Trainer)(config)
        losses = [record.loss for record in itertools.islice(trainer.steps(), NUM_STEPS)]
        return WORKS if all(map(math.isfinite, losses)) else f"! the losses are {losses}"
    except UserError as error:
        return first_line(error, folder)
    except PeerFailed:
        return ""
    except Exception as error:
        traceback.print_exc()
        return f"! {type(error).__name__}: {first_line(error, folder) if str(error) else ''}"
    finally:
        if trainer is not None:
            trainer.close()
        torch._dynamo.reset()


def attempt_each(pairs: Sequence[Pair], folder: str) -> None:
    """Try pairs one after the other, and append each result to a file of this rank."""
    with quick_kernels(), open(Path(folder) / f"results{os.environ['RANK']}.jsonl", "a") as file:
        for pair in pairs:
            file.write(json.dumps([pair.kind, pair.features, attempt(pair, Path(folder))]) + "\n")
            file.flush()


def read_results(folder: Path) -> dict[Pair, str]:
    """Return the results of the attempts that all ranks have finished."""
    found: dict[Pair, list[str]] = {}
    for path in folder.glob("results*.jsonl"):
        for line in path.read_text().splitlines():
            kind, features, result = json.loads(line)
            found.setdefault(Pair(kind, tuple(features)), []).append(result)
    return {pair: worst(results) for pair, results in found.items() if len(results) == pair.num_ranks}


def worst(results: Sequence[str]) -> str:
    """Combine the results of the ranks: a defect if there is one, else a rejection, else `WORKS`."""
    return min(results, key=lambda result: (not result.startswith("!"), result in (WORKS, "")))


def try_pairs(pairs: Sequence[Pair], folder: Path) -> dict[Pair, str]:
    """Try pairs on forked ranks.  If the ranks die or hang, that is a defect of the pair, and new ranks continue."""
    found: dict[Pair, str] = {}
    while left := [pair for pair in pairs if pair not in found]:
        same = [pair for pair in left if pair.num_ranks == left[0].num_ranks]
        for path in folder.glob("results*.jsonl"):
            path.unlink()
        died = ""
        try:
            run_ranks(same[0].num_ranks, attempt_each, same, str(folder), timeout_s=180 + 60 * len(same))
        except AssertionError as error:
            died = str(error).splitlines()[0]
            print(error)
        found |= read_results(folder)
        if died and (unfinished := [pair for pair in same if pair not in found]):
            found[unfinished[0]] = f"! the ranks died: {died}"
    return {pair: found[pair] for pair in pairs}


def try_all(pairs: Sequence[Pair]) -> dict[Pair, str]:
    """Try all pairs in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), dict.fromkeys(pair.kind for pair in pairs))
        return try_pairs(pairs, Path(name))


# ---------------------------------------------------------------------------------------------------------------
# The page

_INTRO = """\
# What works with what

Each kind of model was tried with each feature, and each feature with each other, by two training steps of a tiny
model on two or four ranks. A check mark means that it trains, and that the losses are finite. A number stands for the
reason below, which is the first line of the message that the run prints. A dash means two values of one setting.

This page is written by `python -m tests.compatibility --write`; a test checks it.
"""
_TRIED = """\
- Each attempt has `mesh.shard=2`, unless its row says otherwise. Compiled blocks were tried with the backend
  `aot_eager`, which traces as usual and generates no code, and float8 with emulated products, on a CPU.
- Adapters, packed bases and objectives start from weights in Hugging Face's format. Objectives other than `distill`
  read chats or labelled texts, all others read text.
- `hf` is [any model of transformers](any-model.md): dense is a Llama, mixture a Qwen3-MoE, hybrid a Qwen3-Next. Another
  one may differ.
- Two features were tried on a Llama, or on a Qwen3-MoE if one of them concerns experts. Three or more together were not
  tried here.
"""


class Footnotes:
    """The reasons for rejections, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, result: str) -> str:
        """Return the text of a table cell for a result."""
        return "✓" if result == WORKS else str(self.numbers.setdefault(result, len(self.numbers) + 1))

    def lines(self) -> list[str]:
        """Return the reasons as a numbered list."""
        return [f"{number}. `{text.removeprefix('! ')}`" for text, number in self.numbers.items()]


def page(results: dict[Pair, str]) -> str:
    """Return the page, in Markdown."""
    notes = Footnotes()
    names = list(FEATURES)
    kinds = ["| | " + " | ".join(kind.title for kind in KINDS.values()) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for name, feature in FEATURES.items():
        cells = [notes.mark(results[Pair(kind, (name,))]) for kind in KINDS]
        kinds.append(f"| {feature.title} | " + " | ".join(cells) + " |")
    by_features = {pair.features: result for pair, result in results.items() if len(pair.features) == 2}
    heads = [FEATURES[name].head for name in names]
    both = ["| | " + " | ".join(heads[:-1]) + " |", "|---" * len(heads) + "|"]
    for row, name in enumerate(names[1:], start=1):
        cells = []
        for other in names[: len(names) - 1]:
            result = by_features.get((other, name))
            cells.append("" if names.index(other) >= row else "-" if result is None else notes.mark(result))
        both.append(f"| {FEATURES[name].head} | " + " | ".join(cells) + " |")
    parts = [_INTRO, "## Models and features\n", *kinds, "\n## Two features\n", *both, "\n## Reasons\n", *notes.lines()]
    return "\n".join([*parts, "\n## How it was tried\n", _TRIED])


def read_page(text: str) -> dict[Pair, str]:
    """Return the results that a page states.  Raises KeyError if it lacks a kind or a feature."""
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    tables = [
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines() if line[:4] != "|---"]
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    by_title = {kind.title: name for name, kind in KINDS.items()}
    by_name = {feature.title: name for name, feature in FEATURES.items()}
    by_head = {feature.head: name for name, feature in FEATURES.items()}
    found = {}
    for (_, *heads), *rows in tables[:1]:
        for title, *cells in rows:
            for head, mark in zip(heads, cells, strict=True):
                found[Pair(by_title[head], (by_name[title],))] = reasons.get(mark, WORKS)
    for (_, *heads), *rows in tables[1:2]:
        for title, *cells in rows:
            for head, mark in zip(heads, cells, strict=True):
                if mark not in ("", "-"):
                    features = (by_head[head], by_head[title])
                    found[Pair(kind_for(features), features)] = reasons.get(mark, WORKS)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md; needs torchao, for float8")
    chosen = parser.parse_args()
    names = available_features()
    results = try_all([*pairs_of_kinds(names), *pairs_of_features(names)])
    for pair, result in results.items():
        if result != WORKS:
            print(f"{pair.kind:12} {' + '.join(pair.features):24} {result}")
    defects = [pair for pair, result in results.items() if result.startswith("!")]
    print(f"{len(results)} pairs, {sum(result == WORKS for result in results.values())} work, {len(defects)} defects")
    if chosen.write:
        if len(names) < len(FEATURES):
            sys.exit("torchao is not installed, so float8 was not tried, and the page is not written")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
