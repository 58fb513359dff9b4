"""Finds out which kinds of model and features work together, by training tiny models for two steps on two ranks.

    python -m tests.compatibility            # try all pairs and print what does not work
    python -m tests.compatibility --write    # also write docs/compatibility.md

Each kind of model is tried with each feature (`tests/exactness/table.py`), and each pair of features on a Llama, or on
a Qwen3-MoE if one of them concerns experts.  Each attempt builds a Trainer from a configuration, as any run does, and
trains two steps.  If the configuration is rejected, the first line of the message is recorded.  `train.compile` uses
the backend aot_eager, which traces like the default and generates no machine code; float8 is emulated.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from tests.exactness import inputs
from tests.exactness.table import FEATURES, KINDS, configure
from tests.exactness.walk import on_each
from tests.helpers.launch import REPOSITORY
from trainer import RunConfig, Trainer, UserError
from trainer.errors import PeerFailed

PAGE = REPOSITORY / "docs" / "compatibility.md"
NUM_STEPS = 2
"""The loss of the second step depends on the update of the first one."""
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None

KIND_TITLES = {
    "llama": "Llama",
    "gpt2": "GPT-2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3",
    "hf_dense": "hf: dense",
    "hf_mixture": "hf: mixture",
    "hf_hybrid": "hf: hybrid",
}


@dataclass(frozen=True)
class Title:
    """The title of a feature's row on the page, and the head of its column."""

    title: str
    head: str


FEATURE_TITLES = {
    "masked": Title("Masked documents: `data.documents=masked`", "masked"),
    "replicate": Title("Replicas: `mesh.replicate=2`", "replicas"),
    "context": Title("Split sequences: `mesh.context=2`", "context"),
    "tensor": Title("Shared matrices: `mesh.tensor=2`", "tensor"),
    "exchange": Title(
        "Divided experts, tokens exchanged: `mesh.expert=2 mesh.expert_method=exchange`", "expert exchange"
    ),
    "gather": Title("Divided experts, tokens gathered: `mesh.expert=2 mesh.expert_method=gather`", "expert gather"),
    "lora": Title("Adapters: `lora.rank=4`", "LoRA"),
    "lora_experts": Title("Adapters of stacked experts: `lora.rank=4 lora.targets=[experts]`", "LoRA experts"),
    "nf4": Title("Base in 4 bits: `lora.rank=4 lora.base_dtype=nf4`", "nf4"),
    "fp8": Title("Base in 8 bits: `lora.rank=4 lora.base_dtype=fp8`", "fp8"),
    "full": Title("Recomputation: `train.activation_checkpoint=full`", "full"),
    "selective": Title("In part: `train.activation_checkpoint=selective`", "selective"),
    "budget": Title("By a budget: `train.activation_checkpoint=budget:0.5`", "budget"),
    "compile": Title("Compiled blocks: `train.compile=true`", "compile"),
    "cpu_offload": Title("Parameters on the host: `fsdp.cpu_offload=true`", "cpu offload"),
    "activations": Title("Activations on the host: `train.offload_activations=1.0`", "activations"),
    "float8": Title("Float8: `train.float8=rowwise fsdp.param_dtype=bfloat16`", "float8"),
    "muon": Title("Muon: `optim.name=muon`", "Muon"),
    "int8": Title("Moments in 8 bits: `optim.state_dtype=int8`", "8-bit"),
    "ema": Title("Averaged weights: `train.ema=0.9`", "EMA"),
    "sharded": Title("Sharded accumulation: `fsdp.accumulate=sharded`", "sharded"),
    "dpo": Title("`train.objective=dpo`", "dpo"),
    "kto": Title("`train.objective=kto`", "kto"),
    "reward": Title("`train.objective=reward`", "reward"),
    "classify": Title("`train.objective=classify`", "classify"),
    "distill": Title("`train.objective=distill`", "distill"),
}

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
        """Two, or four for replicas whose ranks share something, and for two axes that share sequences."""
        axes = {"replicate", "context", "tensor"} & {*self.features}
        divides_experts = {"exchange", "gather"} & {*self.features}
        return 4 if len(axes) == 2 or ("replicate" in axes and divides_experts) else 2

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
# Attempts


def prepare(folder: Path, kinds: Iterable[str] = tuple(KINDS)) -> None:
    """Write the data, and the weights of these kinds, that attempts read."""
    inputs.write_data(folder)
    written = on_each(1, functools.partial(inputs.write_weights, folder), {kind: kind for kind in kinds}, folder)
    assert not any(isinstance(result, str) for result in written.values()), written


def config_of(pair: Pair, folder: Path) -> RunConfig:
    """Return the configuration of an attempt.  `folder` is the one that `prepare` has filled.  Raises UserError."""
    own = [f"run.dir={folder}/runs/{pair.kind}-{'-'.join(pair.features)}", "run.timeout_s=120"]
    return configure(pair.kind, pair.features, folder, *own)


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


def attempt_in(folder: Path, pair: Pair) -> str:
    """Do what `attempt` does, with kernels that are quick to build."""
    with quick_kernels():
        return attempt(pair, folder)


def worst(results: Sequence[str]) -> str:
    """Combine the results of the ranks: a defect if there is one, else a rejection, else `WORKS`."""
    return min(results, key=lambda result: (not result.startswith("!"), result in (WORKS, "")))


def try_pairs(pairs: Sequence[Pair], folder: Path) -> dict[Pair, str]:
    """Try pairs on forked ranks.  If the ranks die or hang, that is a defect of the pair, and new ranks continue."""
    found: dict[Pair, str] = {}
    for ranks in sorted({pair.num_ranks for pair in pairs}):
        same = {str(pair): pair for pair in pairs if pair.num_ranks == ranks}
        results = on_each(ranks, functools.partial(attempt_in, folder), same, folder)
        for name, result in results.items():
            died = isinstance(result, str)
            found[same[name]] = f"! the ranks died: {result.splitlines()[0]}" if died else worst(result)
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
    kinds = ["| | " + " | ".join(KIND_TITLES.values()) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for name, feature in FEATURE_TITLES.items():
        cells = [notes.mark(results[Pair(kind, (name,))]) for kind in KINDS]
        kinds.append(f"| {feature.title} | " + " | ".join(cells) + " |")
    by_features = {pair.features: result for pair, result in results.items() if len(pair.features) == 2}
    heads = [FEATURE_TITLES[name].head for name in names]
    both = ["| | " + " | ".join(heads[:-1]) + " |", "|---" * len(heads) + "|"]
    for row, name in enumerate(names[1:], start=1):
        cells = []
        for other in names[: len(names) - 1]:
            result = by_features.get((other, name))
            cells.append("" if names.index(other) >= row else "-" if result is None else notes.mark(result))
        both.append(f"| {FEATURE_TITLES[name].head} | " + " | ".join(cells) + " |")
    parts = [_INTRO, "## Models and features\n", *kinds, "\n## Two features\n", *both, "\n## Reasons\n", *notes.lines()]
    return "\n".join([*parts, "\n## How it was tried\n", _TRIED])


def read_page(text: str) -> dict[Pair, str]:
    """Return the results that a page states.  Raises KeyError if it lacks a kind or a feature."""
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    tables = [
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines() if line[:4] != "|---"]
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    by_title = {title: name for name, title in KIND_TITLES.items()}
    by_name = {feature.title: name for name, feature in FEATURE_TITLES.items()}
    by_head = {feature.head: name for name, feature in FEATURE_TITLES.items()}
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
