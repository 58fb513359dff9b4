"""Layers of a configuration: which place wins, what a layer drops, and the values that follow from others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.native_models import folder_of
from trainer import UserError, load_config
from trainer.checkpoint.find import find_checkpoints
from trainer.config.changes import compare_configs, on_resume
from trainer.config.keys import COMMAND_LINE, declared_keys
from trainer.config.load import Layer, command_line_layer, load, load_stored, merge
from trainer.config.rules import check_config

Values = dict[str, Any]


@pytest.mark.parametrize(
    ("layers", "merged"),
    [
        ([{"a.x": 1, "a.y": 2}, {"a.x": 3}], {"a.x": 3, "a.y": 2}),
        ([{"model.name": "llama", "model.dim": 8}, {"model.name": "gpt2"}], {"model.name": "gpt2"}),
        ([{"model.name": "llama", "model.dim": 8}, {"model.name": "llama"}], {"model.name": "llama", "model.dim": 8}),
        (
            [{"model.name": "llama", "model.dim": 8}, {"model.name": "gpt2", "model.dim": 4}],
            {"model.name": "gpt2", "model.dim": 4},
        ),
        ([{"objective.beta": 1, "train.objective": "dpo"}, {"train.objective": "ipo"}], {"train.objective": "ipo"}),
        ([{"run.dir": "a"}, {"run.name": "other"}], {"run.name": "other"}),
        ([{"run.dir": "a"}, {"run.name": "other", "run.dir": "b"}], {"run.name": "other", "run.dir": "b"}),
        ([{"train.steps": 5}, {"train.epochs": 2}], {"train.epochs": 2}),
        ([{"train.epochs": 2}, {"train.steps": 5}], {"train.steps": 5}),
        ([{"train.steps": 5}, {"train.epochs": None}], {"train.steps": 5, "train.epochs": None}),
    ],
)
def test_later_layers_win_and_drop_what_no_longer_applies(layers: list[Values], merged: Values) -> None:
    values, origins = merge([Layer(str(number), layer) for number, layer in enumerate(layers)])
    assert values == merged
    assert origins == {key: "1" if key in layers[1] else "0" for key in merged}


def test_a_run_as_a_recipe_says_where_it_is_and_lends_its_name(tmp_path: Path) -> None:
    run = tmp_path / "ran"
    run.mkdir()
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text(load_config("llama_small", ["run.name=first"]).stored_yaml())
    continued = load(str(run))
    assert (continued.config.run.name, continued.config.run.dir) == ("first", str(run))
    assert continued.origins["run.dir"] == "where the run is"
    assert load_config(str(run), ["run.dir=elsewhere"]).run.name == "ran"


def test_steps_and_epochs_in_one_place_are_refused() -> None:
    with pytest.raises(UserError, match=r"^train\.epochs=2.*train\.steps=5"):
        merge([command_line_layer(["train.steps=5", "train.epochs=2"])])


def test_origins_say_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: llama_small\noptim: {lr: 0.1}\n")
    loaded = load(str(tmp_path / "mine.yaml"), ["train.steps=7"])
    assert loaded.origins["train.steps"] == COMMAND_LINE
    assert loaded.origins["optim.lr"].endswith("mine.yaml")
    assert loaded.origins["schedule.warmup_steps"] == "conf/llama_small.yaml"
    assert loaded.origins["run.name"].startswith("computed: ")
    assert "optim.eps" not in loaded.origins


@pytest.mark.parametrize(
    ("line", "number"),
    [("steps: 010", "010"), ("steps: 1:30", "1:30"), ("{steps: 010}", "010"), ("freeze: [a, 007]", "007")],
)
def test_number_in_another_base_is_refused_in_a_file(line: str, number: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"line 3: .*{number}.*base 8"):
        load_config(recipe(tmp_path, f"recipe: llama_small\ntrain:\n  {line}\n"))


def test_quoted_digits_in_a_file_are_text(tmp_path: Path) -> None:
    assert load_config(recipe(tmp_path, "recipe: llama_small\nrun: {name: '007'}\n")).run.name == "007"


def recipe(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


# ---------------------------------------------------------------------------------------------------------------
# The model that comes with the weights


def test_weights_beat_a_recipe_file_and_the_command_line_must_agree(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", attention_dropout=None)
    file = recipe(tmp_path, f"model: {{name: llama, dim: 64}}\ntrain: {{init_from: {folder}}}\n")
    loaded = load(file)
    assert loaded.config.model.dim == 32
    assert loaded.origins["model.dim"].endswith("config.json")
    assert load_config(file, ["model.dim=32"]).model.dim == 32
    with pytest.raises(UserError, match=r"^model\.dim=64: .*says 32"):
        load_config(file, ["model.dim=64"])
    allowed = load_config(file, ["model.dim=64", "checkpoint.allow_changes=[model.dim]"])
    assert allowed.model.dim == 64


def test_auto_model_takes_no_field_of_the_model_that_it_replaces(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    found = load("llama_small", ["model.name=auto", f"model.path={folder}"])
    assert (found.config.model.name, found.config.model.dim) == ("llama", 32)
    assert found.config.train.init_from == str(folder)
    generic = load_config("llama_small", ["model.name=auto", f"model.path={folder}", "model.attention=eager"])
    assert (generic.model.name, generic.model.attention) == ("hf", "eager")


# ---------------------------------------------------------------------------------------------------------------
# Values that follow from others


def test_data_source_follows_from_the_path(tmp_path: Path) -> None:
    file = recipe(tmp_path, "model: {name: llama}\n")
    assert load_config(file).data.source == "stdlib"
    assert load_config(file, ["data.path=a.txt"]).data.source == "tokens"
    assert load_config(file, ["data.path=a.jsonl", "data.source=chat"]).data.source == "chat"
    # A run stores what was found: other data need another source, which the message names.
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(load_config(file).stored_yaml())
    branch = [str(tmp_path), ["run.name=other", "data.path=a.txt"]]
    with pytest.raises(UserError, match=r"^data\.path=a\.txt: .*stdlib(.|\n)*data\.source=auto"):
        check_config(load_config(*branch), 1, 1)  # type: ignore[arg-type]
    assert load_config(str(tmp_path), [*branch[1], "data.source=auto"]).data.source == "tokens"


def test_automatic_rate_needs_a_width(tmp_path: Path) -> None:
    assert load_config("llama_small", ["optim.lr=auto"]).optim.lr == pytest.approx(5e-5 * (2000 / 96) ** 0.78, rel=5e-3)
    why = load("llama_small", ["optim.lr=auto"]).origins["optim.lr"]
    assert why == "computed: 5e-05 x (2000 / 96) ** 0.78"
    own = "tests.helpers.custom_recipes:mlp"
    with pytest.raises(UserError, match=r"^optim\.lr=auto: .* width"):
        load_config(recipe(tmp_path, f"model: {{name: '{own}'}}\n"), ["optim.lr=auto"])


@pytest.mark.parametrize(
    "text", ["echo ${RUN_DIR}", r"a\${X}", r"a\\${oc.env:HOME}", "1e3", "off", "a: b # c", "one\ntwo\n", "  ", "\u00e9"]
)
def test_stored_text_is_read_back_as_it_is(text: str, tmp_path: Path) -> None:
    config = load_config("llama_small")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, on_end=text))
    (tmp_path / "printed.yaml").write_text(config.to_yaml({"run.on_end": "a\nplace"}))
    assert load_config(str(tmp_path / "printed.yaml")).run.on_end == text


# ---------------------------------------------------------------------------------------------------------------
# Rules that are declared beside the keys


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("data.train_on=all", "data.source=chat"),
        ("data.trim_rows=true", "data.source=chat"),
        ("lora.alpha=3", "lora.rank=16"),
        ("log.prompts=[a]", "eval.every=1"),
        ("checkpoint.keep_best=1", "eval.every=1"),
    ],
)
def test_setting_without_what_it_needs_is_refused(setting: str, needed: str) -> None:
    key, own = setting.partition("=")[0], ["eval.every=0"]
    with pytest.raises(UserError, match=rf"^{key}=.*{needed.partition('=')[0]}") as refused:
        check_config(load_config("llama_small", [*own, setting]), 1, 1)
    check_config(load_config("llama_small", [*own, refused.value.proposal]), 1, 1)
    if not needed.startswith("data"):
        check_config(load_config("llama_small", [*own, needed, setting]), 1, 1)


def test_every_need_names_a_key_with_an_example() -> None:
    declared = declared_keys()
    needs = {key: item.metadata["needs"] for key, item in declared.items() if "needs" in item.metadata}
    assert len(needs) >= 14
    for need in needs.values():
        key, _, choice = need.partition("=")
        assert choice or declared[key].metadata["example"]


def test_every_key_says_whether_a_resume_may_change_it() -> None:
    """And a change of each kind is treated so."""
    rules = {key: on_resume(key, item) for key, item in declared_keys().items()}
    assert {rules[key] for key in ("data.seq_len", "optim.name", "lora.rank", "run.seed")} == {"fixed"}
    assert {rules[key] for key in ("optim.lr", "mesh.shard", "data.num_workers", "data.weights")} == {"free"}
    assert {rules[key] for key in ("run.name", "checkpoint.every", "log.every")} == {"ignored"}
    stored = load_config("llama_small").stored_yaml()
    changed = load_config("llama_small", ["data.seq_len=64", "optim.lr=1", "run.name=other", "log.every=3"])
    refused, permitted = compare_configs(changed, stored)
    assert refused == ["data.seq_len: 256 in the checkpoint, 64 now"]
    assert [line.partition(":")[0] for line in permitted] == ["optim.lr"]


@pytest.mark.parametrize("name", ["llama_small", "llama3_8b", "qwen3_moe_small", "dpo", "kto", "reward"])
def test_stored_configuration_is_complete(name: str, tmp_path: Path) -> None:
    """It is the run's, but for the folders, which are not stored."""
    own = [f"model.path={folder_of(tmp_path / 'model')}"] if name in ("dpo", "kto", "reward") else []
    config = load_config(name, [*own, "run.name=mine", "data.path=x.jsonl", "eval.every=5"])
    found = load_stored(config.stored_yaml())
    assert (found.run.dir, found.run.name) == ("", "mine")
    assert dataclasses.replace(found, run=config.run) == config


def test_checkpoints_inside_a_moved_run_are_found(tmp_path: Path) -> None:
    saved = tmp_path / "a" / "saved" / "step_00000002"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    config = load_config("llama_small", [f"run.dir={tmp_path / 'a'}", f"checkpoint.dir={tmp_path / 'a' / 'saved'}"])
    (tmp_path / "a" / "config.yaml").write_text(config.stored_yaml())
    (tmp_path / "a").rename(tmp_path / "b")
    assert str(find_checkpoints(tmp_path / "b")) == str(tmp_path / "b" / "saved")
