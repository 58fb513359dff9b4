"""The configuration: precedence, parsing of values, types, the mesh, and what a resume may change."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.cases import campaign_except
from tests.helpers.launch import tiny
from tests.helpers.runs import SharedRun
from trainer import RunConfig, UserError, load_config, run
from trainer.config.changes import compare_configs, has_changed
from trainer.config.files import recipe_files
from trainer.config.keys import declared_keys
from trainer.config.load import load_stored
from trainer.config.parallel import MeshShape, resolve_mesh_shape
from trainer.config.rules import check_config
from trainer.config.schema import MeshSection, TrainSection
from trainer.registry import find_model

FOR_A_FOLDER = ("name: auto", "recipe: dpo", "recipe: sft")
RECIPES = [name for name, path in recipe_files().items() if not any(text in path.read_text() for text in FOR_A_FOLDER)]
"""Recipes that define a model; the others need a model folder."""


def recipe(folder: Path, text: str) -> str:
    """Write a recipe file and return what `recipe=` takes."""
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def get(config: RunConfig, key: str) -> Any:
    return operator.attrgetter(key)(config)


# ---------------------------------------------------------------------------------------------------------------
# Values


def test_command_line_overrides_recipe_overrides_defaults(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama, dim: 64}\ntrain: {steps: 7, global_batch_size: 4}\n")
    config = load_config(file, ["train.steps=9", "model.dim=128"])
    assert (config.train.steps, config.model.dim) == (9, 128)  # type: ignore[attr-defined]
    assert config.train.global_batch_size == 4
    assert config.train.micro_batch_size == TrainSection().micro_batch_size
    assert (config.run.name, config.run.dir) == ("mine", "runs/mine")


def test_another_model_on_the_command_line_has_its_own_defaults() -> None:
    model: Any = load_config("llama_small", ["model.name=gpt2", "model.num_layers=2"]).model
    assert (model.dim, model.num_layers, model.vocab_size) == (768, 2, 50257)
    assert load_config("llama_small", ["model.name=llama"]) == load_config("llama_small")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "12", 12),
        ("optim.lr", "1e-3", 0.001),
        ("optim.lr", "1", 1.0),
        ("optim.betas", "[0.8,0.9]", (0.8, 0.9)),
        ("optim.max_grad_norm", "null", None),
        ("fsdp.cpu_offload", "true", True),
        ("fsdp.reshard_after_forward", "4", 4),
        ("fsdp.reshard_after_forward", "[always,2,never]", ["always", 2, "never"]),
        ("fsdp.output_dtype", "null", None),
        ("mesh.shard", "node", "node"),
        ("mesh.shard", "2", 2),
        ("train.activation_checkpoint", "full", "full"),
        ("checkpoint.allow_changes", "[model.dim,data.seed]", ("model.dim", "data.seed")),
        ("log.wandb", "off", "off"),
        ("data.path", "null", None),
        ("data.path", "007", "007"),
        *(("run.name", text, text) for text in ("007", "no", "null", "1e3", "a=b", "a: b", "[x", "x # y", " x ", "{")),
    ],
)
def test_parsing_of_values(key: str, text: str, value: Any) -> None:
    found = get(load_config("llama_small", [f"{key}={text}"]), key)
    assert found == value
    assert type(found) is type(value)


def test_off_in_a_recipe_file_is_text(tmp_path: Path) -> None:
    """YAML 1.1 reads a bare `off` as false."""
    assert load_config(recipe(tmp_path, "model: {name: llama}\nlog:\n  wandb: off\n")).log.wandb == "off"


def test_value_of_another_key(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama}\ndata: {seed: '${run.seed}'}\n")
    assert load_config(file, ["run.seed=5"]).data.seed == 5
    assert load_config("llama_small", ["run.seed=5", "data.seed=${run.seed}"]).data.seed == 5


@pytest.mark.parametrize("text", ["", "5", "- a", "model: llama", "train: {steps: 1", "a: b: c", "model: {name: 5}"])
def test_invalid_recipe_file_is_a_user_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        load_config(recipe(tmp_path, text))


def test_error_in_a_recipe_file_names_the_file(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama}\ntrain: {step: 5}\n")
    with pytest.raises(UserError) as raised:
        load_config(file)
    assert str(raised.value).startswith("train.step=5: ")
    assert file in str(raised.value)


def test_configuration_is_frozen() -> None:
    config = load_config("llama_small")
    for owner in (config, *(getattr(config, section.name) for section in dataclasses.fields(config))):
        for item in dataclasses.fields(owner):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(owner, item.name, getattr(owner, item.name))


YAML_VALUES = ["1", "-1", "0", "0.5", "1e400", "nan", ".inf", "true", "null", "[]", "[1,2]", "{}", "{a: b}", "no"]
YAML_VALUES += ["", "???", "${x}", "${", "${train.steps}", "!!python/none", "*a", "&a 1", "\x00", "0x1F", "é"]


@pytest.mark.slow
@pytest.mark.parametrize("number_of", [60, pytest.param(1000, marks=pytest.mark.campaign)])
def test_random_overrides_are_rejected_or_survive_a_round_trip(number_of: int, tmp_path: Path) -> None:
    """Seeded random overrides give a configuration that its own YAML reproduces, or a UserError, and nothing else."""
    draw = random.Random(0)
    keys = [*declared_keys(find_model("llama").config), "model", "train", "a.b.c", "", ".", "train.", "..", "x"]
    accepted = 0
    for number in range(number_of):
        key, value = draw.choice(keys), draw.choice(YAML_VALUES)
        if draw.random() < 0.3:
            value = "".join(draw.choice("[]{}:,#&*!|>'\"%@`$?-~ \t\n\\ax01.é") for _ in range(draw.randrange(8)))
        if draw.random() < 0.1:
            at = draw.randrange(len(key) + 1)
            key = key[:at] + draw.choice("x. =[") + key[at:]
        override = f"{key}={value}"
        try:
            config = load_config("llama_small", [override])
            check_config(config, world_size=4, local_world_size=2)
        except UserError:
            continue
        except Exception as error:
            raise AssertionError(f"{override!r} gave {error!r}") from error
        accepted += 1
        if "$" not in value and accepted % 3 == 0:
            again = tmp_path / f"{number}.yaml"
            again.write_text(config.to_yaml())
            assert load_config(str(again)) == config, override
    assert 0 < accepted < number_of, "both kinds must have been tried"


def test_legal_values_of_the_contract_are_accepted() -> None:
    keys = declared_keys(find_model("llama").config)
    for key, legal in (
        ("data.source", {"stdlib", "synthetic", "tokens"}),
        ("optim.name", {"adamw", "sgd", "muon"}),
        ("schedule.name", {"cosine", "linear", "wsd", "constant"}),
        ("checkpoint.mode", {"async", "sync"}),
        ("log.wandb", {"off", "offline", "online"}),
    ):
        assert legal <= set(typing.get_args(keys[key].type)), key
    for override in (
        *(f"train.activation_checkpoint={value}" for value in ("none", "full", "selective", "3")),
        *(f"train.compile={value}" for value in ("true", "false", "auto")),
        *(f"fsdp.wrap={value}" for value in ("block", "size:1000", "package.module:function")),
        *(f"checkpoint.every={value}" for value in ("0", "100", "auto")),
    ):
        check_config(load_config("llama_small", [override]), 1, 1)


# ---------------------------------------------------------------------------------------------------------------
# Printed and written


@pytest.mark.parametrize("name", campaign_except(RECIPES, ["llama_small", "deepseek_v3_small"]))
def test_print_config_prints_a_recipe_of_the_same_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([f"recipe={name}", "--print-config", "train.steps=3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    config = load_config(name, ["train.steps=3"])
    assert load_config(recipe(tmp_path, printed.out)) == config
    written = yaml.safe_load(printed.out)
    assert list(written) == [section.name for section in dataclasses.fields(RunConfig)], "the YAML alone"
    assert written["model"]["name"] == config.model.name


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\u2029b", "a\x85b", "\x85", "a\nb", "1e3", " x ", "a: b # c", r"\${x} \\"]
)
def test_text_survives_a_round_trip(text: str, tmp_path: Path) -> None:
    config = load_config("llama_small", [f"run.on_end={text}"])
    assert load_config(recipe(tmp_path, config.to_yaml())) == config
    assert load_stored(config.stored_yaml()).run.on_end == config.run.on_end


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipe=llama3_70b", "mesh.replicate=8", "mesh.shard=64"],
        ["recipe=llama3_8b", "mesh.shard=node", "fsdp.reshard_after_forward=8"],
        ["recipe=llama3_8b", "mesh.shard=node", "mesh.replicate=2", "log.profile_ranks=[8]"],
        ["recipe=llama_small", "fsdp.reshard_after_forward=4", "nproc=4", "train.micro_batch_size=1"],
    ],
)
def test_print_config_needs_neither_the_ranks_nor_the_data(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*arguments, "--print-config"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_config_yaml_of_a_run_is_a_recipe(one: SharedRun) -> None:
    given = [override for override in tiny(*one.overrides) if not override.startswith("nproc=")]
    config = load_config("llama_small", [*given, f"run.dir={one.folder}"])
    assert load_config(str(one.folder / "config.yaml")) == config


# ---------------------------------------------------------------------------------------------------------------
# The mesh


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "local_world_size", "expected"),
    [
        (1, -1, 1, 1, (1, 1)),
        (1, -1, 8, 8, (1, 8)),
        (2, -1, 8, 4, (2, 4)),
        (2, 4, 8, 8, (2, 4)),
        (-1, 4, 8, 8, (2, 4)),
        (-1, 1, 4, 4, (4, 1)),
        (1, "node", 4, 4, (1, 4)),
        (1, "node", 8, 4, (2, 4)),
        (-1, "node", 16, 4, (4, 4)),
        (3, -1, 8, 8, None),
        (16, -1, 8, 8, None),
        (1, 3, 8, 8, None),
        (1, 4, 8, 8, None),
        (-1, 16, 8, 8, None),
        (2, 2, 8, 8, None),
        (-1, -1, 8, 8, None),
        (0, -1, 8, 8, None),
        (1, -2, 8, 8, None),
        (1, "node", 6, 4, None),
        (4, "node", 8, 4, None),
    ],
)
def test_mesh(
    replicate: int, shard: int | str, world_size: int, local_world_size: int, expected: tuple[int, int] | None
) -> None:
    mesh = MeshSection(replicate, shard)
    if expected:
        shape = resolve_mesh_shape(mesh, world_size, local_world_size)
        assert (shape.replicate, shape.shard) == expected
        assert shape.has_replicas == (expected[0] > 1)
        return
    with pytest.raises(UserError) as refused:
        resolve_mesh_shape(mesh, world_size, local_world_size)
    key, _, value = refused.value.proposal.partition("=")
    proposed = dataclasses.replace(mesh, **{key.removeprefix("mesh."): int(value)})
    assert resolve_mesh_shape(proposed, world_size, local_world_size).num_ranks == world_size


def test_mesh_is_exactly_as_requested_or_rejected() -> None:
    num_legal = 0
    sizes = range(-2, 9)
    for world_size, local, replicate, shard in itertools.product((1, 2, 6, 8), (1, 2), sizes, [*sizes, "node"]):
        try:
            shape = resolve_mesh_shape(MeshSection(replicate, shard), world_size, local)
        except UserError:
            continue
        num_legal += 1
        assert shape.num_ranks == world_size, "never rounded"
        assert replicate in (-1, shape.replicate) or (shard == "node" and replicate == 1)
        assert shard in (-1, shape.shard) or (shard == "node" and shape.shard == local)
    assert num_legal > 30


@pytest.mark.parametrize(
    ("shape", "local", "num_nodes"),
    [
        (MeshShape(1, 8), 4, 0),
        (MeshShape(4, 2), 4, 0),
        (MeshShape(1, 3), 3, 0),
        (MeshShape(2, 6), 4, 2),
        (MeshShape(2, 20), 8, 3),
        (MeshShape(8, 11), 8, 3),
    ],
)
def test_shards_across_parts_of_nodes_are_warned_about(shape: MeshShape, local: int, num_nodes: int) -> None:
    """With the number of nodes that a group of shards spans, and `node` as the alternative if all nodes are full."""
    warning = shape.straddling_warning(local)
    if num_nodes == 0:
        assert warning == ""
        return
    assert warning.startswith(f"mesh.shard={shape.shard} ")
    assert f" {num_nodes} nodes" in warning
    assert ("mesh.shard=node" in warning) == (shape.num_ranks % local == 0)


# ---------------------------------------------------------------------------------------------------------------
# A custom model

OWN_MODEL = """
{future}
from dataclasses import dataclass
from trainer import ModelSpec, register

@dataclass{frozen}
class Shape:
    width: int = 8
    scale: float = 0.5
    kind: str = "a"
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None

def build(config):
    raise NotImplementedError

register(ModelSpec("{name}", Shape, build))
"""


@pytest.mark.parametrize(
    ("name", "future", "frozen"),
    [("own_plain", "", ""), ("own_frozen", "from __future__ import annotations", "(frozen=True)")],
)
def test_plain_dataclass_is_type_checked(
    name: str, future: str, frozen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(OWN_MODEL.format(future=future, frozen=frozen, name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    file = recipe(tmp_path, f"model: {{name: '{name}:{name}', width: 16}}\n")
    overrides = ["model.scale=1e-2", "model.kind=007", "model.flag=true", "model.sizes=[3,4,5]", "model.limit=null"]
    config = load_config(file, overrides)
    model: Any = config.model
    assert isinstance(model, sys.modules[name].Shape)
    assert (model.width, model.scale, model.kind, model.flag) == (16, 0.01, "007", True)
    assert (model.sizes, model.limit) == ((3, 4, 5), None)
    for override in ("width=many", "width=null", "scale=x", "flag=maybe", "sizes=[a]", "widht=5"):
        with pytest.raises(UserError) as refused:
            load_config(file, [f"model.{override}"])
        assert str(refused.value).startswith(f"model.{override}: ")
    assert load_config(recipe(tmp_path, config.to_yaml())) == config


# ---------------------------------------------------------------------------------------------------------------
# Resuming

FREE = (
    "optim.lr",
    "optim.weight_decay",
    "schedule.",
    "train.steps",
    "eval.every",
    "checkpoint.every",
    "log.",
    "mesh.",
    "fsdp.",
    "data.num_workers",
    "data.weights",
    "data.phases",
    "train.micro_batch_size",
)
FORBIDDEN = ("model.", "optim.name", "data.", "train.global_batch_size", "run.seed")
UNSAID = ("data.cache_dir",)
"""A place and its size, not the data: the contract's `data.*` does not mean it."""
OF_SAME_TYPE = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.25,
    str: lambda value: value + "x",
    tuple: lambda value: (*value, *value) or ("x",),
    type(None): lambda value: "x",
}
"""For each type, a function that returns a different value."""


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return a section, or the entire configuration, in which one key has another value."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})


def with_changed(config: RunConfig, keys: list[str]) -> RunConfig:
    """Return a configuration in which these keys have different values."""
    for key in keys:
        value = get(config, key)
        config = with_value(config, key, OF_SAME_TYPE[type(value)](value))
    return config


def keys_in(differences: list[str]) -> list[str]:
    return sorted(line.partition(":")[0] for line in differences)


@pytest.mark.parametrize("name", ["llama_small", pytest.param("gpt2", marks=pytest.mark.campaign)])
def test_what_a_resume_may_change(name: str) -> None:
    """Each difference is reported by its key; those that are forbidden only refuse a resume if they are not allowed."""
    config = load_config(name)
    stored, keys = config.to_yaml(), list(declared_keys(type(config.model)))
    free = [key for key in keys if key.startswith(FREE)]
    forbidden = [key for key in keys if key.startswith(FORBIDDEN) and key not in (*free, *UNSAID, "model.name")]
    for stated in (*FREE, *FORBIDDEN):
        assert any(key.startswith(stated) for key in (*free, *forbidden)), stated
    assert compare_configs(config, stored) == ([], [])
    reported = [key for key in free if not key.startswith(("log.", "checkpoint."))]  # those do not change the training
    refused, told = compare_configs(with_changed(config, free), stored)
    assert (refused, keys_in(told)) == ([], sorted(reported))
    changed = with_changed(config, forbidden)
    refused, told = compare_configs(changed, stored)
    assert (keys_in(refused), told) == (sorted(forbidden), [])
    for allowed in (forbidden, ["model", "optim", "data", "train", "run"]):
        permitted = with_value(changed, "checkpoint.allow_changes", tuple(allowed))
        assert compare_configs(permitted, stored)[0] == []
    one_missing = with_value(changed, "checkpoint.allow_changes", tuple(forbidden[1:]))
    assert keys_in(compare_configs(one_missing, stored)[0]) == forbidden[:1]


def test_difference_shows_both_values_and_a_changed_model_only_its_name() -> None:
    stored = load_config("llama_small").to_yaml()
    (refused,), (free,) = compare_configs(load_config("llama_small", ["model.dim=48", "optim.lr=1.0"]), stored)
    assert refused.index("model.dim: 96 ") < refused.index("48")
    assert free.index("optim.lr: 0.004 ") < free.index("1.0")
    (refused,), free = compare_configs(load_config("llama_small", ["model.name=qwen3", "model.head_dim=16"]), stored)
    assert refused.index("model.name: llama ") < refused.index("qwen3")
    assert free == []


def test_text_that_looks_like_a_reference_has_not_changed() -> None:
    """It is escaped where it is stored."""
    config = load_config("llama_small", [r"run.on_end=echo \${STATE}", r"data.tokenizer=\${folder}/tokenizer.json"])
    assert config.data.tokenizer == "${folder}/tokenizer.json"
    assert compare_configs(config, config.stored_yaml()) == ([], [])


def test_key_has_changed_if_its_values_differ() -> None:
    config = load_config("llama_small", ["data.seq_len=128", "log.every=3"])
    stored = load_config("llama_small").to_yaml()
    assert has_changed(config, stored, "data.tokenizer", "data.seq_len")
    assert not has_changed(config, stored, "data.tokenizer", "data.chat_template")
    assert has_changed(config, stored, "log.every"), "even if a resume does not report it"
