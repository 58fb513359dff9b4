"""Export to and import from Hugging Face folders: the same logits, the same bits, into the shards of any mesh."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers import hf_models
from tests.helpers.cases import campaign_except
from tests.helpers.launch import fork, on_ranks
from tests.helpers.native_models import (
    LLAMA,
    MODELS,
    TINY,
    Memory,
    assert_same_bits,
    build,
    difference,
    export_model,
    folder_of,
    load_with_transformers,
    tokenizer_json,
)
from trainer import HuggingFace, ModelSpec, Transposed, UserError, fill, load_config, load_weights
from trainer.model.initial_weights import materialize
from trainer.model.parameters import local_box
from trainer.model.shard import apply_sharding
from trainer.registry import find_model, register
from trainer.weights.exporting import export

INDEX = "model.safetensors.index.json"


# ---------------------------------------------------------------------------------------------------------------
# Out, and back


@pytest.mark.parametrize("name", campaign_except(MODELS, ["llama 3.1", "llama tied", "deepseek_v3 plain"]))
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe, config = MODELS[name]
    model = build(recipe, config)
    with caplog.at_level(logging.WARNING):
        export_model(model, recipe, config, tmp_path, end_id=256)
        theirs = load_with_transformers(tmp_path)
    assert not caplog.records, "transformers has something to say of config.json"
    assert difference(model, theirs) < 1e-5
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.config.bos_token_id is None, "and not that of the published model"


@pytest.mark.parametrize("name", campaign_except(MODELS, ["llama tied", "gpt2", "gpt_oss", "qwen3_next"]))
def test_an_export_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    """From several files, with an index of them."""
    recipe, config = MODELS[name]
    model = build(recipe, config)
    export_model(model, recipe, config, tmp_path, max_shard_bytes=40_000)
    assert_same_bits(load_weights(tmp_path), model)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert len({*modes.values()}) == 1, f"whoever may read one file may read them all: {modes}"
    declared = load_config("llama_small", ["model.name=auto", f"model.path={tmp_path}"]).model
    assert declared == replace(config, name=recipe.name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_large_model_is_split_into_files_with_an_index(name: str, tmp_path: Path) -> None:
    recipe, config = MODELS[name]
    model = build(recipe, config)
    files = export_model(model, recipe, config, tmp_path, max_shard_bytes=40_000)
    shards = [file for file in files if file.suffix == ".safetensors"]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert [file.name for file in shards] == names
    assert len(shards) > 2
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {key: file.name for file in shards for key in load_file(file)}
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in model.parameters())
    for file in shards:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 40_000 or len(tensors) == 1
    assert difference(model, load_with_transformers(tmp_path)) < 1e-5


def test_export_in_a_different_dtype(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    export_model(model, LLAMA, TINY, tmp_path, dtype=torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    for name, weight in load_weights(tmp_path).named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.get_parameter(name).bfloat16().float())
    assert load_with_transformers(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_weights_that_float16_cannot_hold_are_not_exported_as_infinity(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    export_model(model, LLAMA, TINY, tmp_path / "fits", dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter("layers.1.feed_forward.w2.weight")[3, 5] = -1e5
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        export_model(model, LLAMA, TINY, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beside", [False, True])
def test_transformers_uses_the_exported_tokenizer(beside: bool, tmp_path: Path) -> None:
    """Its end token is that of its settings, or else that of the run."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_bytes(tokenizer_json("?", "one", "two"))
    if beside:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    path = str(tmp_path / "source" / "tokenizer.json")
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path / "out", tokenizer=path, end_id=4)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("two")["input_ids"] == [2]
    assert loaded.decode([1]) == "one"
    assert loaded.eos_token_id == (3 if beside else 4)


# ---------------------------------------------------------------------------------------------------------------
# What transformers wrote

SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
OF_16 = {"original_max_position_embeddings": 16}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": SCALING | OF_16 | {"rope_theta": 5e4}}),
    "gpt2": ("gpt2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, odd heads": ("qwen3_next", {"head_dim": 17}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN | OF_16, "num_nextn_predict_layers": 0}),
    "deepseek_v3, plain": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def model_of(name: str) -> Any:
    """Return transformers' model with its own random weights."""
    transformers = pytest.importorskip("transformers")
    kind, changes = THEIRS[name]
    # The norm after the delta rule divides by the length of what a query reads, which is a sum that may cancel: with
    # large weights, both libraries differ from float64 by a thousand times float32's rounding.
    std = 0.06 if kind == "qwen3_next" else 0.16
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        hf_models.settings_of(kind, initializer_range=std, **changes), dtype=torch.float32
    )


COVERED = ("llama", "gpt2", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss")
"""Also trained and compared with transformers by the tests of the models."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.campaign if name in COVERED else ()) for name in THEIRS]
)
def test_folder_of_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    theirs = model_of(name)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX).exists()
    ours = load_weights(tmp_path)
    assert not type(ours).__module__.startswith("transformers")
    assert difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama, tied"])
def test_files_without_the_prefix(name: str, tmp_path: Path) -> None:
    """As transformers saves a model without its head."""
    theirs = model_of(name)
    theirs.base_model.save_pretrained(tmp_path)
    assert not any(key.startswith(("transformer.", "model.")) for key in load_file(tmp_path / "model.safetensors"))
    assert difference(load_weights(tmp_path), theirs) < 1e-5


def test_obsolete_tensors_of_old_files_are_ignored(tmp_path: Path) -> None:
    recipe, config = MODELS["gpt2"]
    folder_of(tmp_path, recipe, config)
    file = tmp_path / "model.safetensors"
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(load_file(file) | mask, file)
    assert_same_bits(load_weights(tmp_path), build(recipe, config))


def test_a_file_with_a_tied_weight_twice(tmp_path: Path) -> None:
    """Copies are one weight; an untied model has two different ones, which a tied one rejects."""
    recipe, tied = MODELS["llama tied"]
    folder_of(tmp_path / "one", recipe, tied)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    shutil.copytree(tmp_path / "one", tmp_path / "both")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    assert_same_bits(load_weights(tmp_path / "both"), build(recipe, tied))
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    with pytest.raises(UserError, match=r"tok_embeddings\.weight and head\.output\.weight"):
        load_weights(tmp_path / "both")
    untied = folder_of(tmp_path / "untied", recipe, replace(tied, tie_embeddings=False))
    shutil.copy(tmp_path / "one" / "model.safetensors", untied)
    with pytest.raises(UserError, match=r"head\.output\.weight \(263, 32\)"):
        load_weights(untied)


# ---------------------------------------------------------------------------------------------------------------
# Straight into shards


@dataclass(frozen=True)
class OddConfig:
    """Tables of fewer rows than ranks, and of rows that no number of ranks divides."""

    vocab_size: int = 5
    width: int = 7


class Odd(nn.Module):
    """A custom model: biases, and a persistent buffer."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(3))
        self.norm = nn.BatchNorm1d(config.width)
        self.out = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))


NAMES = {
    "table.weight": "odd.wte.weight",
    "blocks.*.weight": Transposed("odd.h.*.w"),
    "blocks.*.bias": "odd.h.*.b",
    "norm.*": "odd.norm.*",
    "out.*": "score.*",
}
ODD = ModelSpec(
    "odd",
    OddConfig,
    Odd,
    units=["table", "blocks.*", "out"],
    hf=HuggingFace(
        model_type="odd",
        architecture="OddForCausalLM",
        names=NAMES,
        config=lambda config: {"vocab_size": config.vocab_size, "n": config.width},
        model_fields=lambda content: {"vocab_size": content["vocab_size"], "width": content["n"]},
        prefix="odd.",
    ),
)
register(ODD)
SHARDED = MODELS | {"odd": (ODD, ODD.config())}


class Counted(Memory):
    """Counts the bytes that are read."""

    num_bytes = 0

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = super().read(name, start, stop)
        self.num_bytes += tensor.nbytes
        return tensor


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of weights that have another name too, which a file has only once."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()


def fill_each(shape: tuple[int, ...], cases: tuple[str, ...]) -> list[str]:
    """Load models into the shards of a mesh; return all errors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    settings = load_config("llama_small", ["fsdp.param_dtype=float32"])
    wrong = []
    for case in cases:
        recipe, config = SHARDED[case]
        plain = build(recipe, config)
        with torch.device("meta"):
            model = recipe.build_model(config)
        apply_sharding(model, recipe, settings, mesh)
        materialize(model, 1, torch.device("cpu"), recipe.init)
        state = plain.state_dict()
        source = Counted({name: tensor for name, tensor in state.items() if name not in tied_names(plain)})
        fill(model, source, "train.init_from")
        held = 0
        for name in source.shapes:
            weight = model.state_dict()[name]
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            box = tuple(slice(start, stop) for start, stop in local_box(weight)) if weight.ndim else ()
            held += source.tensors[name][box[:1]].nbytes  # of a single row that is divided, all is read
            if not torch.equal(local, source.tensors[name][box]):
                wrong.append(f"{case} {name}: {box}")
        if source.num_bytes != held:
            wrong.append(f"{case}: {source.num_bytes} bytes read, {held} held")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((2,), ("odd", "llama tied")),
        pytest.param((4,), ("odd", "llama tied"), marks=pytest.mark.campaign),
        *(pytest.param(shape, tuple(SHARDED), marks=pytest.mark.campaign) for shape in ((2,), (2, 2))),
    ],
)
def test_each_rank_reads_only_its_own_rows(shape: tuple[int, ...], cases: tuple[str, ...]) -> None:
    """Odd vocabularies give uneven shards, five rows on four ranks an empty one."""
    ranks = torch.Size(shape).numel()
    assert on_ranks(ranks, fill_each, shape, cases) == [[]] * ranks


def test_recipe_of_ones_own(tmp_path: Path) -> None:
    model = build(ODD, ODD.config())
    model.norm.num_batches_tracked.fill_(17)
    export_model(model, ODD, ODD.config(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["odd.h.2.w"].t(), model.blocks[2].weight)
    assert "score.bias" in stored
    assert_same_bits(load_weights(tmp_path), model)


def test_recipe_without_names_or_with_too_few(tmp_path: Path) -> None:
    for names, wrong in (
        (None, "odd"),
        ({name: to for name, to in NAMES.items() if name != "out.*"}, r"out\.weight"),
        (NAMES | {"blocks.*.bias": "h.b"}, r"h\.b"),
    ):
        recipe = replace(ODD, hf=None if names is None else replace(ODD.hf, names=names))
        with pytest.raises(UserError, match=wrong):
            export_model(build(ODD, ODD.config()), recipe, ODD.config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------
# What does not fit


def test_every_difference_is_listed_and_nothing_is_written() -> None:
    model, before = build(LLAMA, TINY), build(LLAMA, TINY)
    tensors = build(LLAMA, TINY, seed=1).state_dict()
    absent = ["layers.0.attention.wq.weight", "head.norm.weight"]
    for name in absent:
        del tensors[name]
    tensors |= {"lm_head.bias": torch.ones(263), "layers.1.feed_forward.w1.weight": torch.ones(64, 31)}
    with pytest.raises(UserError) as caught:
        fill(model, Memory(tensors), "train.init_from")
    said = str(caught.value)
    assert said.startswith("train.init_from: ")
    assert [name for name in (*absent, "lm_head.bias", "layers.1.feed_forward.w1.weight") if name not in said] == []
    assert re.search(r"\(64, 31\).*\(64, 32\)", said)
    assert "layers.0.attention.wk.weight" not in said, "that one fits"
    assert_same_bits(model, before)


def test_unknown_tensors_are_listed_by_their_own_name(tmp_path: Path) -> None:
    folder_of(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    save_file(load_file(file) | {name: torch.ones(32)}, file)
    with pytest.raises(UserError, match=re.escape(name)):
        load_weights(tmp_path)


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-00001-*"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_index, INDEX),
        (lambda folder: (folder / INDEX).write_text("{"), INDEX),
        (lambda folder: first_shard(folder).unlink(), "model-00001-of-"),
        (lambda folder: first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-5]), "model-00001-of-"),
        (lambda folder: first_shard(folder).write_bytes(b"\xff" * 1000), "model-00001-of-"),
        (lambda folder: save_file({"model.norm.weight": torch.ones(32)}, first_shard(folder)), "model-00001-of-"),
    ],
    ids=["no index", "index broken", "shard absent", "truncated", "no header", "other tensors"],
)
def test_damage_to_one_of_several_files_names_it(damage: Any, named: str, tmp_path: Path) -> None:
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path, max_shard_bytes=40_000)
    damage(tmp_path)
    with pytest.raises(UserError) as refused:
        load_weights(tmp_path)
    assert str(refused.value).startswith(f"path={tmp_path}: ")
    assert named in str(refused.value)


# ---------------------------------------------------------------------------------------------------------------
# Where an export may go, and what it leaves


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_only_an_earlier_export_is_overwritten(tmp_path: Path) -> None:
    model = build(LLAMA, TINY)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=f"^folder={theirs}: "):
        export_model(model, LLAMA, TINY, theirs, overwrite=True)
    assert names_in(theirs) == {"config.json"}

    ours = tmp_path / "deep" / "ours"
    export_model(model, LLAMA, TINY, ours, max_shard_bytes=40_000, end_id=256)
    (ours / "README.md").write_text("mine")
    with pytest.raises(UserError, match=f"^folder={ours}: "):
        export_model(model, LLAMA, TINY, ours)
    export_model(model, LLAMA, TINY, ours, overwrite=True)
    assert names_in(ours) == {"config.json", "model.safetensors", "README.md"}
    with pytest.raises(UserError, match=f"^folder={ours}/README.md: "):
        export_model(model, LLAMA, TINY, ours / "README.md")


class Failing(Memory):
    """Fails in the middle."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name == "layers.1.attention.wq.weight":
            raise OSError("the disk is gone")
        return super().read(name, start, stop)


def test_failed_export_keeps_the_previous_one(tmp_path: Path) -> None:
    old, new = build(LLAMA, TINY), Failing(build(LLAMA, TINY, seed=1).state_dict())
    with pytest.raises(OSError, match="the disk is gone"):
        export(new, LLAMA, TINY, tmp_path)
    assert names_in(tmp_path) == set()
    export_model(old, LLAMA, TINY, tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        export(new, LLAMA, TINY, tmp_path, overwrite=True)
    assert names_in(tmp_path) == {"config.json", "model.safetensors"}
    assert_same_bits(load_weights(tmp_path), old)


class Killing(Memory):
    """Kills its process at the last weight."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name == "head.output.weight":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(name, start, stop)


def export_and_die(folder: Path) -> int:
    export(Killing(build(LLAMA, TINY).state_dict()), LLAMA, TINY, folder, max_shard_bytes=40_000)
    return 0


@pytest.mark.slow
def test_leftovers_of_a_killed_export_are_no_model_and_do_no_harm(tmp_path: Path) -> None:
    assert fork(export_and_die, [tmp_path], tmp_path).wait().code == -signal.SIGKILL
    assert len(names_in(tmp_path)) > 2
    with pytest.raises(UserError, match=str(tmp_path)):
        load_weights(tmp_path)
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path)
    assert names_in(tmp_path) == {"config.json", "model.safetensors"}


def test_a_crash_between_the_renames_leaves_no_model(tmp_path: Path) -> None:
    """Neither old weights with the new configuration, nor only some of the new files."""
    options = {"max_shard_bytes": 40_000, "overwrite": True}
    names = {file.name for file in export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path, **options)}
    for number in range(len(names)):
        left = iter(range(number))

        def replace_some(source: Path, target: Path, left: Iterator[int] = left, rename: Any = os.rename) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            rename(source, target)

        with mock.patch.object(os, "replace", replace_some), pytest.raises(KeyboardInterrupt):
            export_model(build(LLAMA, TINY, seed=1), LLAMA, TINY, tmp_path, **options)
        with pytest.raises(UserError, match=f"^path={tmp_path}"):
            load_weights(tmp_path)
    export_model(build(LLAMA, TINY, seed=2), LLAMA, TINY, tmp_path, **options)
    assert names_in(tmp_path) == names
    assert_same_bits(load_weights(tmp_path), build(LLAMA, TINY, seed=2))


class Made(Memory):
    """Weights that are made when they are read."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        rows, *rest = self.shapes[name]
        return torch.full((len(range(rows)[start:stop]), *rest), 0.5)


def measure_export(name: str, dtype: torch.dtype | None, folder: Path) -> tuple[float, float]:
    """Return the size of the largest exported file and what an export adds to the peak of this process, in MiB."""

    def mib(field: str) -> float:
        return int(re.search(field + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]

    recipe = find_model(name)
    config = recipe.config(vocab_size=60000, dim=1536, num_layers=2, num_heads=12)
    with torch.device("meta"):
        model = recipe.build_model(config)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = mib("VmRSS")
    files = export(Made(model.state_dict()), recipe, config, folder, dtype=dtype, max_shard_bytes=100 * 10**6)
    return max(file.stat().st_size for file in files) / 2**20, mib("VmHWM") - before


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", None)])
def test_export_needs_memory_for_one_file_only(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """And for a block of 64 MiB, as read and converted; files are of 100 MB, but for the largest tensor."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")
    ((size, peak),) = on_ranks(1, measure_export, name, dtype, tmp_path)
    assert size > 150
    assert peak < size + 2 * 64 + 40, "and what Python needs"
