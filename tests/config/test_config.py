"""The configuration: precedence, parsing of values, the mesh that follows from it, and what a resume may change."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import re
import resource
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import tiny_overrides
from trainer import RunConfig, UserError, load_config, run
from trainer.config import (
    MeshSection,
    MeshShape,
    TrainSection,
    check_config,
    compare_configs,
    declared_keys,
    has_changed,
    recipe_description,
    recipe_files,
    resolve_mesh_shape,
    type_name,
)
from trainer.config.rules import compiles_blocks
from trainer.recipe import find_recipe

FOR_A_FOLDER = ("name: auto", "recipe: dpo", "recipe: sft")
RECIPES = sorted(n for n, path in recipe_files().items() if not any(text in path.read_text() for text in FOR_A_FOLDER))
"""Recipes that define a model; the others need a model folder."""


def recipe(folder: Path, text: str) -> str:
    """Write a recipe file and return what `recipe=` takes."""
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def get(config: RunConfig, key: str) -> Any:
    return operator.attrgetter(key)(config)


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return a section, or the entire configuration, in which one key has another value."""
    name, _, rest = key.partition(".")
    value = with_value(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: value})


# ---------------------------------------------------------------------------------------------------------------
# Values


def test_command_line_overrides_recipe_overrides_defaults(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama, dim: 64}\ntrain: {steps: 7, global_batch_size: 4}\n")
    config = load_config(file, ["train.steps=9", "model.dim=128"])
    assert (config.train.steps, config.model.dim) == (9, 128)
    assert config.train.global_batch_size == 4
    assert config.train.micro_batch_size == TrainSection().micro_batch_size
    assert (config.run.name, config.run.dir) == ("mine", "runs/mine")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "12", 12),
        ("optim.lr", "1e-3", 0.001),
        ("optim.lr", "1", 1.0),
        ("optim.betas", "[0.8,0.9]", (0.8, 0.9)),
        ("optim.max_grad_norm", "null", None),
        ("fsdp.cpu_offload", "true", True),
        ("fsdp.reshard_after_forward", "never", "never"),
        ("fsdp.reshard_after_forward", "4", 4),
        ("fsdp.reshard_after_forward", "[always,2,never]", ["always", 2, "never"]),
        ("fsdp.output_dtype", "null", None),
        ("mesh.shard", "node", "node"),
        ("mesh.shard", "2", 2),
        ("train.activation_checkpoint", "2", 2),
        ("train.activation_checkpoint", "full", "full"),
        ("checkpoint.allow_changes", "[model.dim,data.seed]", ("model.dim", "data.seed")),
        ("checkpoint.resume", "none", "none"),
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


@pytest.mark.parametrize("where", ["recipe", "command line"])
def test_interpolation(where: str, tmp_path: Path) -> None:
    text = "data: {seed: '${run.seed}'}\n" if where == "recipe" else ""
    overrides = ["run.seed=5", *(["data.seed=${run.seed}"] if where == "command line" else [])]
    assert load_config(recipe(tmp_path, "model: {name: llama}\n" + text), overrides).data.seed == 5


@pytest.mark.parametrize("key", ["train.steps", "run.name", "run.dir", "data.path"])
@pytest.mark.parametrize("text", ["${nowhere}", "${nowhere.at.all}", "${", "???"])
def test_text_with_omegaconf_syntax_does_not_crash(key: str, text: str) -> None:
    """It is taken literally, or it is a user error."""
    try:
        taken = get(load_config("llama_small", [f"{key}={text}"]), key)
    except UserError as error:
        refused = str(error)
    else:
        assert taken == text
        return
    assert key in refused


@pytest.mark.parametrize(
    "name", [":llama", ".llama:llama", "a..b:c", "tests.helpers.custom_recipes:nothing", "nowhere:"]
)
def test_unknown_model_is_a_user_error(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.name="):
        load_config("llama_small", [f"model.name={name}"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", "steps"),
        ("train: {steps: 1}\noptim: {lr: 1.0}\ntrain: {steps: 2}\n", "train"),
    ],
)
def test_repeated_key_in_a_recipe_file_is_rejected(text: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"duplicate key.*{key}"):
        load_config(recipe(tmp_path, "model: {name: llama}\n" + text))


@pytest.mark.parametrize(
    "text", ["", "5", "- a", "model: llama", "train: {steps: 1", "\t", "a: b: c", "model: {name: 5}"]
)
def test_invalid_recipe_file_is_rejected(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        load_config(recipe(tmp_path, text))


def test_error_in_a_recipe_file_names_the_file(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama}\ntrain: {step: 5}\n")
    with pytest.raises(UserError, match=re.escape(f"train.step=5: no such key (in {file})")):
        load_config(file)


def test_configuration_is_frozen() -> None:
    config = load_config("llama_small")
    for owner in (config, *(getattr(config, section.name) for section in dataclasses.fields(config))):
        # An objective may have no fields; it has this attribute.
        name = next((item.name for item in dataclasses.fields(owner)), "rows_per_sample")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(owner, name, getattr(owner, name))


@pytest.mark.slow
@pytest.mark.parametrize("number_of", [60, pytest.param(1000, marks=pytest.mark.campaign)])
def test_random_overrides_are_rejected_or_survive_a_round_trip(number_of: int, tmp_path: Path) -> None:
    """Seeded random overrides give a configuration that its own YAML reproduces, or a UserError, and nothing else."""
    draw = random.Random(0)
    keys = [*declared_keys(find_recipe("llama").config), "model", "train", "a.b.c", "", ".", "train.", "..", "x"]
    values = [
        "1",
        "-1",
        "0",
        "0.5",
        "1e400",
        "nan",
        ".inf",
        "true",
        "null",
        "[]",
        "[1,2]",
        "{}",
        "{a: b}",
        "no",
        "node",
    ]
    values += ["", "???", "${x}", "${train.steps}", "!!python/none", "*a", "&a 1", "\x00", "2020-01-01", "0x1F", "é"]
    accepted = 0
    for number in range(number_of):
        key, value = draw.choice(keys), draw.choice(values)
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
    assert 0.05 < accepted / number_of < 0.9, "both kinds must have been tried"


# ---------------------------------------------------------------------------------------------------------------
# Printed and written


@pytest.mark.parametrize("name", RECIPES)
def test_print_config_prints_a_recipe_of_the_same_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([f"recipe={name}", "--print-config", "train.steps=3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert load_config(recipe(tmp_path, printed.out)) == load_config(name, ["train.steps=3"])
    written = yaml.safe_load(printed.out)
    assert list(written) == [section.name for section in dataclasses.fields(RunConfig)], "the YAML alone"
    assert written["model"]["name"] == load_config(name).model.name


def test_config_yaml_of_a_run_is_a_recipe(tmp_path: Path) -> None:
    from trainer import Trainer

    overrides = ["model.num_kv_heads=2", "data.source=synthetic", "run.threads=1", "optim.betas=[0.8,0.9]"]
    overrides += ["train.steps=1", f"run.dir={tmp_path / 'run'}", "run.name=007"]
    config = load_config("llama_small", tiny_overrides(*overrides))
    trainer = Trainer(config)
    assert trainer.fit() == 0
    trainer.close()
    assert load_config(str(tmp_path / "run" / "config.yaml")) == config


@pytest.fixture(scope="module")
def help_text() -> tuple[str, float]:
    """What `--help` prints, and the CPU time that it took (wall time depends on who else is on the machine)."""
    script = (
        "import sys; from trainer.run import main; code = main(['--help']); sys.exit(code or 'torch' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr or "torch was imported"
    assert done.stderr == ""
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_help_is_quick(help_text: tuple[str, float]) -> None:
    assert help_text[1] < 1.0


@pytest.mark.slow
def test_help_lists_every_recipe(help_text: tuple[str, float]) -> None:
    for name, path in recipe_files().items():
        assert len(recipe_description(path)) > 20
        assert re.search(rf"^  {name} +{re.escape(recipe_description(path))}$", help_text[0], re.MULTILINE)


@pytest.mark.slow
def test_help_lists_every_key_with_type_default_and_meaning(help_text: tuple[str, float]) -> None:
    listed = re.findall(r"^  (\S+)  \[(.+); default (.+)\]\n      (.+)$", help_text[0], re.MULTILINE)
    for model in ("llama", "gpt2"):
        for key, item in declared_keys(find_recipe(model).config).items():
            meaning = item.metadata.get("meaning", "a registered model")
            rows = [row for row in listed if row[0] == key and row[3] == meaning]
            assert rows, key
            assert type_name(item.type) in rows[0][1], key
            assert item.default is dataclasses.MISSING or rows[0][2], key
    assert ("optim.betas", "a list of 2 numbers", "[0.9, 0.95]") in [row[:3] for row in listed]
    assert ("data.path", "text or {name: text} or null", "null") in [row[:3] for row in listed]
    assert ("mesh.shard", "a whole number or text", "-1") in [row[:3] for row in listed]


# ---------------------------------------------------------------------------------------------------------------
# The mesh


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "local_world_size", "expected"),
    [
        (1, -1, 1, 1, (1, 1)),
        (1, -1, 8, 8, (1, 8)),
        (1, 8, 8, 8, (1, 8)),
        (2, -1, 8, 4, (2, 4)),
        (2, 4, 8, 8, (2, 4)),
        (-1, 4, 8, 8, (2, 4)),
        (-1, 1, 4, 4, (4, 1)),
        (4, 1, 4, 4, (4, 1)),
        (1, "node", 1, 1, (1, 1)),
        (1, "node", 4, 4, (1, 4)),
        (1, "node", 8, 4, (2, 4)),
        (2, "node", 8, 4, (2, 4)),
        (-1, "node", 16, 4, (4, 4)),
        (3, -1, 8, 8, None),
        (16, -1, 8, 8, None),
        (1, 3, 8, 8, None),
        (1, 4, 8, 8, None),
        (-1, 3, 8, 8, None),
        (-1, 16, 8, 8, None),
        (2, 2, 8, 8, None),
        (-1, -1, 8, 8, None),
        (0, -1, 8, 8, None),
        (1, 0, 8, 8, None),
        (-2, 1, 8, 8, None),
        (1, -2, 8, 8, None),
        (1, "nod", 8, 8, None),
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
    else:
        with pytest.raises(UserError) as refused:
            resolve_mesh_shape(mesh, world_size, local_world_size)
        resolve_mesh_shape(as_advised(mesh, str(refused.value)), world_size, local_world_size)  # the advice is legal


def as_advised(mesh: MeshSection, message: str) -> MeshSection:
    """Return the mesh with the nearest legal value that the message names."""
    advice = re.search(r"nearest legal value: mesh\.(\w+)=(-?\d+)$", message)
    assert advice, message
    return dataclasses.replace(mesh, **{advice[1]: int(advice[2])})


def test_mesh_is_exactly_as_requested_or_rejected() -> None:
    num_legal = 0
    for world_size, local, replicate, shard in itertools.product(
        (1, 2, 6, 8), (1, 2), range(-2, 9), [*range(-2, 9), "node"]
    ):
        try:
            shape = resolve_mesh_shape(MeshSection(replicate, shard), world_size, local)
        except UserError:
            continue
        num_legal += 1
        assert shape.num_ranks == world_size, "never rounded"
        assert replicate in (-1, shape.replicate) or (shard == "node" and replicate == 1)
        assert shard in (-1, shape.shard) or (shard == "node" and shape.shard == local)
    assert num_legal > 30


# ---------------------------------------------------------------------------------------------------------------
# A custom model

OWN_MODEL = """
{future}
from dataclasses import dataclass
from trainer import Recipe, register

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

register(Recipe("{name}", Shape, build))
"""


@pytest.mark.parametrize("frozen", ["", "(frozen=True)"])
@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_plain_dataclass_is_type_checked(
    frozen: str, future: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_shape_{bool(frozen):d}{bool(future):d}"
    (tmp_path / f"{name}.py").write_text(OWN_MODEL.format(future=future, frozen=frozen, name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    file = recipe(tmp_path, f"model: {{name: '{name}:{name}', width: 16}}\n")

    overrides = ["model.scale=1e-2", "model.kind=007", "model.flag=true", "model.sizes=[3,4,5]", "model.limit=null"]
    config = load_config(file, overrides)
    model = config.model
    assert isinstance(model, sys.modules[name].Shape)
    assert (model.width, model.scale, model.kind, model.flag) == (16, 0.01, "007", True)
    assert (model.sizes, model.limit) == ((3, 4, 5), None)
    assert config.recipe is find_recipe(name)
    for override, must_say in (
        ("model.width=many", "whole number"),
        ("model.width=null", "whole number"),
        ("model.scale=x", "a number"),
        ("model.flag=maybe", "true or false"),
        ("model.sizes=[a]", "a list of whole numbers"),
        ("model.widht=5", "did you mean model.width=5?"),
    ):
        with pytest.raises(UserError, match=re.escape(must_say)):
            load_config(file, [override])
    assert load_config(recipe(tmp_path, config.to_yaml())) == config


# ---------------------------------------------------------------------------------------------------------------
# Resuming

FREE = ("optim.lr", "optim.weight_decay", "schedule.", "train.steps", "eval.every", "checkpoint.every", "log.", "mesh.",
        "fsdp.", "data.num_workers", "data.weights", "data.phases", "train.micro_batch_size")  # fmt: skip
FORBIDDEN = ("model.", "optim.name", "data.", "train.global_batch_size", "run.seed")
UNSAID = ("data.cache_dir", "data.cache_gib")
"""A place and its size, not the data: the contract's `data.*` does not mean it."""


def changed_values(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield every key, with a configuration in which only that key has a different value."""
    for key in declared_keys(type(config.model)):
        value = get(config, key)
        other = {
            bool: lambda v: not v,
            int: lambda v: v + 1,
            float: lambda v: v + 0.25,
            str: lambda v: v + "x",
            tuple: lambda v: (*v, *v) or ("x",),
            type(None): lambda v: "x",
        }[type(value)](value)
        yield key, with_value(config, key, other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe_name", ["llama_small", pytest.param("gpt2", marks=pytest.mark.campaign)])
def test_what_a_resume_may_change(recipe_name: str, tmp_path: Path) -> None:
    config = load_config(recipe_name)
    stored = config.to_yaml()
    assert compare_configs(config, stored) == ([], [])
    seen = set()
    for key, changed in changed_values(config):
        refused, free = compare_configs(changed, stored)
        if key.startswith(FREE):
            assert not refused
            says_nothing = key.startswith(("log.", "checkpoint."))  # they change nothing that is trained
            assert [line.partition(":")[0] for line in free] == ([] if says_nothing else [key])
        elif key.startswith(FORBIDDEN) and key not in UNSAID:
            assert len(refused) == 1
            assert refused[0].startswith(f"{key}: {shown(get(config, key))} in the checkpoint, ")
            allowed = dataclasses.replace(changed.checkpoint, allow_changes=(key,))
            assert compare_configs(dataclasses.replace(changed, checkpoint=allowed), stored)[0] == []
        seen.add(key)
    for stated in (*FREE, *FORBIDDEN):
        assert any(key.startswith(stated) for key in seen), stated


def test_key_missing_in_an_old_checkpoint_has_its_default() -> None:
    config = load_config("llama_small")
    stored = config.to_yaml().replace("  state_dtype: float32\n", "").replace("  state_dtype: 'float32'\n", "")
    assert "state_dtype" not in stored
    assert compare_configs(config, stored) == ([], [])
    refused, _ = compare_configs(load_config("llama_small", ["optim.state_dtype=bfloat16"]), stored)
    assert refused == ["optim.state_dtype: float32 in the checkpoint, bfloat16 now"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe_name", ["llama_small", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("llama3_8b", "gpt2"))]
)
def test_no_key_missing_in_an_old_checkpoint_prevents_a_resume(recipe_name: str) -> None:
    """A key that was added later was set by no one, or the recipe sets it."""
    config = load_config(recipe_name)
    given = yaml.safe_load((REPOSITORY / "conf" / f"{recipe_name}.yaml").read_text())
    whole = yaml.safe_load(config.to_yaml())
    added = [(s, key) for s, values in whole.items() if s != "model" for key in values if key not in given.get(s, {})]
    assert ("data", "holdout") in added
    for section, key in added:
        stored = {**whole, section: {name: value for name, value in whole[section].items() if name != key}}
        assert compare_configs(config, yaml.safe_dump(stored))[0] == [], f"{section}.{key}"


def shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


EVEN = [(8, 8, 4), (8, 4, 4), (8, 2, 4), (12, 12, 4), (3, 3, 3), (4, 1, 2)]


@pytest.mark.parametrize(("ranks", "shard", "local"), EVEN)
def test_mesh_that_divides_evenly_into_nodes(ranks: int, shard: int, local: int) -> None:
    assert MeshShape(ranks // shard, shard).straddling_warning(local) == ""


def test_mesh_that_shards_unevenly_across_nodes_gets_a_warning() -> None:
    assert "mesh.shard=6 does not divide evenly into nodes of 4 ranks" in MeshShape(2, 6).straddling_warning(4)


UNEVEN = [
    (MeshShape(4, 6), 8, "some shard groups span 2 nodes"),
    (MeshShape(2, 6), 4, "each shard group spans 2 nodes"),
    (MeshShape(2, 20), 8, "each shard group spans 3 nodes"),
    (MeshShape(8, 11), 8, "some shard groups span 3 nodes"),
]


@pytest.mark.parametrize(("shape", "local", "words"), UNEVEN)
def test_warning_says_how_many_nodes_a_shard_group_spans(shape: MeshShape, local: int, words: str) -> None:
    assert words in shape.straddling_warning(local)


def test_shards_within_nodes_are_suggested_only_if_all_nodes_are_full() -> None:
    assert "mesh.shard=node" in MeshShape(2, 20).straddling_warning(8)
    assert "mesh.shard=node" not in MeshShape(1, 20).straddling_warning(8), "20 ranks do not divide into nodes of 8"


def test_every_forbidden_difference_is_listed_at_once() -> None:
    stored = load_config("llama_small").to_yaml()
    overrides = ["model.dim=48", "run.seed=3", "data.seq_len=128", "optim.lr=1.0", "train.steps=5"]

    def compare(allowed: str) -> tuple[list[str], list[str]]:
        return compare_configs(load_config("llama_small", [*overrides, f"checkpoint.allow_changes={allowed}"]), stored)

    refused, free = compare("[]")
    assert refused == [
        "run.seed: 0 in the checkpoint, 3 now",
        "model.dim: 96 in the checkpoint, 48 now",
        "data.seq_len: 256 in the checkpoint, 128 now",
    ]
    assert free == ["optim.lr: 0.004 in the checkpoint, 1.0 now", "train.steps: 1400 in the checkpoint, 5 now"]
    assert compare("[model.dim,run.seed]")[0] == ["data.seq_len: 256 in the checkpoint, 128 now"]
    assert compare("[model.dim,run.seed,data.seq_len]")[0] == []


def test_key_has_changed_if_its_values_differ() -> None:
    config = load_config("llama_small", ["data.seq_len=128", "optim.lr=1.0", "log.every=3"])
    stored = load_config("llama_small").to_yaml()
    assert has_changed(config, stored, "data.tokenizer", "data.seq_len")
    assert not has_changed(config, stored, "data.tokenizer", "data.chat_template")
    assert has_changed(config, stored, "log.every"), "even if a resume does not report it"


def test_changed_model_is_reported_without_its_fields() -> None:
    stored, qwen = load_config("llama_small").to_yaml(), ["model.name=qwen3", "model.head_dim=16"]
    told = (["model.name: llama in the checkpoint, qwen3 now"], [])
    assert compare_configs(load_config("llama_small", qwen), stored) == told


def test_legal_values_of_the_contract_are_accepted() -> None:
    keys = declared_keys(find_recipe("llama").config)
    for key, legal in (
        ("data.source", {"stdlib", "synthetic", "tokens"}),
        ("optim.name", {"adamw", "sgd", "muon"}),
        ("schedule.name", {"cosine", "linear", "wsd", "constant"}),
        ("checkpoint.mode", {"async", "sync"}),
        ("log.wandb", {"off", "offline", "online"}),
    ):
        assert legal <= set(typing.get_args(keys[key].type)), key
    for value in ("none", "full", "selective", "3"):
        check_config(load_config("llama_small", [f"train.activation_checkpoint={value}"]), 1, 1)


def test_different_model_on_the_command_line_has_its_own_defaults() -> None:
    config = load_config("llama_small", ["model.name=gpt2", "model.num_layers=2"])
    assert (config.model.dim, config.model.num_layers, config.model.vocab_size) == (768, 2, 50257)
    assert load_config("llama_small", ["model.name=llama"]) == load_config("llama_small")


@pytest.mark.parametrize(
    ("setting", "device_type", "has_compiler", "expected"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("auto", "cpu", True, False),
        ("true", "cpu", True, True),
        ("false", "cuda", True, False),
    ],
)
def test_blocks_are_compiled_by_default_only_on_a_gpu(
    setting: str, device_type: str, has_compiler: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.config.rules.can_compile", lambda device_type: has_compiler)
    config = load_config("llama_small", [f"train.compile={setting}"])
    assert compiles_blocks(config.train.compile, device_type) is expected


def test_legal_values_of_train_compile() -> None:
    with pytest.raises(UserError, match=r"train\.compile=blocks: must be one of true, false, auto"):
        check_config(load_config("llama_small", ["train.compile=blocks"]), 1, 1)
