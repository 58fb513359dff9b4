"""The source of initial weights declares the model, and a later export includes the files that came with it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import tiny
from tests.helpers.native_models import (
    BESIDE,
    GPT2,
    LLAMA,
    SOURCE,
    TINY,
    TOKENS,
    assert_same_bits,
    build,
    chat_folder,
    edit,
    export_model,
    folder_of,
    load_with_transformers,
    tokenizer_json,
)
from trainer import Trainer, UserError, load_config, run
from trainer.data.tokenizer import find_tokenizer
from trainer.export import export_checkpoint
from trainer.weights.model_files import ModelFiles, read_model_files, read_tokenizer

LIKE_TINY = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=2", "train.micro_batch_size=2"]


def config_of(source: Path | str, *overrides: str, recipe: str = "llama_small") -> Any:
    shapeless = [item for item in tiny(*LIKE_TINY) if not item.startswith("model.")]
    return load_config(recipe, [*shapeless, f"train.init_from={source}", "train.steps=1", *overrides])


def fitted(config: Any) -> Trainer:
    trainer = Trainer(config)
    assert trainer.fit() == 0
    trainer.close()
    return trainer


def trained(source: Path | str, folder: Path, *overrides: str) -> Path:
    """Train one step from `source` and return the run's folder."""
    fitted(config_of(source, f"run.dir={folder}", *overrides))
    return folder


# ---------------------------------------------------------------------------------------------------------------
# The shape


def test_model_shape_is_that_of_the_folder(tmp_path: Path) -> None:
    """Not that of the recipe: other values of `rope_theta`, `norm_eps` and heads are a different model."""
    source = folder_of(tmp_path / "source")
    config = config_of(source)
    assert replace(config.model, name="llama") == SOURCE
    assert config_of(source, "model.rope_theta=10000", "model.num_heads=4").model == config.model, "it may be said"
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    (source / "config.json").unlink()
    assert load_config(str(tmp_path / "again.yaml")) == config


def test_training_starts_with_the_loss_of_transformers(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    trainer = Trainer(config_of(source, f"run.dir={tmp_path / 'run'}"))
    trainer.load_checkpoint()
    batch = next(iter(trainer.loader))
    with torch.no_grad():
        logits = load_with_transformers(source)(batch["tokens"]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        found = trainer.loss(batch)
    trainer.close()
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_a_plain_file_may_have_the_names_of_wrappers(tmp_path: Path) -> None:
    """Of DDP, FSDP1, torch.compile and activation checkpointing."""
    model = build(LLAMA, TINY)
    wrappers = {"layers.0.": "layers.0._checkpoint_wrapped_module.", "layers.1.": "module.layers.1."}
    state = {}
    for name, tensor in model.state_dict().items():
        prefix = next((wrapper for wrapper in wrappers if name.startswith(wrapper)), "")
        state[(wrappers.get(prefix) or "_orig_mod.") + name.removeprefix(prefix)] = tensor
    torch.save(state, tmp_path / "weights.pt")
    shape = [f"model.{field}={getattr(TINY, field)}" for field in ("vocab_size", "dim", "num_heads", "num_kv_heads")]
    shape += [f"model.{field}={getattr(TINY, field)}" for field in ("num_layers", "ffn_dim")]
    trainer = Trainer(config_of(tmp_path / "weights.pt", f"run.dir={tmp_path / 'run'}", *shape))
    trainer.load_checkpoint()
    trainer.close()
    assert_same_bits(trainer.model, model)


@pytest.mark.parametrize(
    ("override", "legal"),
    [
        ("model.rope_theta=500000", "model.rope_theta=10000.0"),
        ("model.norm_eps=0.1", "model.norm_eps=1e-06"),
        ("model.num_kv_heads=4", "model.num_kv_heads=2"),
        ("model.tie_embeddings=true", "model.tie_embeddings=false"),
    ],
)
def test_shape_on_the_command_line_must_agree(
    override: str, legal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(tmp_path / "source")
    arguments = ["recipe=llama_small", f"train.init_from={source}", override, f"run.dir={tmp_path / 'run'}"]
    assert run.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {override.partition('=')[0]}=")
    assert f"{source}/config.json" in said
    assert legal in said
    assert not (tmp_path / "run").exists()


def test_all_disagreements_are_named_at_once(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    with pytest.raises(UserError) as refused:
        config_of(source, "model.norm_eps=0.1", "model.num_heads=8")
    allowed = "checkpoint.allow_changes=[model.num_heads,model.norm_eps]"
    assert allowed in str(refused.value)
    assert config_of(source, "model.norm_eps=0.1", "model.num_heads=8", allowed).model.num_heads == 8


def test_settings_that_may_differ_from_the_folder(tmp_path: Path) -> None:
    """A longer context if it is allowed, and settings of training only, such as dropout."""
    source = folder_of(tmp_path / "source")
    longer = ["model.rope_theta=500000", "checkpoint.allow_changes=[model.rope_theta]"]
    run_folder = trained(source, tmp_path / "run", *longer)
    assert load_config(str(run_folder)).model == replace(config_of(source).model, rope_theta=500000.0)
    export_checkpoint(run_folder, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["rope_parameters"]["rope_theta"] == 500000.0
    small = GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64, dropout=0.2)
    other = folder_of(tmp_path / "gpt2", GPT2, small)
    assert config_of(other, recipe="gpt2").model.dropout == 0.2
    assert config_of(other, "model.dropout=0.0", recipe="gpt2").model.dropout == 0.0


def test_different_kind_of_model_is_rejected_by_name(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    with pytest.raises(UserError, match=r"^model\.name=gpt2: (.|\n)*model\.name=llama"):
        config_of(source, recipe="gpt2")


def test_configuration_built_in_code_is_compared_too(tmp_path: Path) -> None:
    """With a folder, and with a run."""
    source = folder_of(tmp_path / "source")
    run_folder = trained(source, tmp_path / "first")
    assert config_of(run_folder).model == config_of(source).model
    for path in (source, run_folder, run_folder / "checkpoints" / "step_00000001"):
        config = config_of(path, f"run.dir={tmp_path / 'run'}")
        trainer = Trainer(replace(config, model=replace(config.model, rope_theta=7.0)))
        with pytest.raises(UserError, match=r"^model\.rope_theta=7\.0: .*10000\.0"):
            trainer.load_checkpoint()
        trainer.close()


def test_folder_without_config_json_gets_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source")
    fields = ("rope_theta", "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
    (source / "config.json").unlink()
    trained(source, tmp_path / "run", *(f"model.{name}={getattr(SOURCE, name)}" for name in fields))
    assert any(line.startswith("warning: ") and str(source) in line for line in capsys.readouterr().err.splitlines())


# ---------------------------------------------------------------------------------------------------------------
# What comes with it, and leaves with it


def files_of(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if not name.endswith(".safetensors")}


def assert_all_but_weights_survive(before: dict[str, bytes], out: Path, **changes: Any) -> None:
    after = files_of(out)
    assert after.keys() == before.keys()
    assert [name for name in before if name != "config.json" and after[name] != before[name]] == []
    told, content = json.loads(before["config.json"]), json.loads(after["config.json"])
    assert content == told | {"exported_by": "meshtrainer"} | changes
    assert list(content)[: len(told)] == list(told), "in the order that they had"


@pytest.mark.parametrize("tokenizer", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_files_that_training_does_not_change_are_exported_unchanged(tokenizer: bool, tmp_path: Path) -> None:
    """Also if the folder was deleted long before, after a resume without it, and by a run that starts from the run."""
    source = chat_folder(tmp_path / "source")
    edit(source, rope_parameters=None, dtype=None, _name_or_path="x/é", transformers_version="4.44.0")
    before = files_of(source)
    own = [f"data.tokenizer={source}/tokenizer.json"] if tokenizer else []
    first = trained(source, tmp_path / "first", *own)
    second = trained(first, tmp_path / "second")
    shutil.rmtree(source)
    goes_on = [f"run.dir={first}", "train.steps=2", "train.init_from=null"]
    assert fitted(load_config(str(first / "config.yaml"), goes_on)).resume.step == 1
    out = tmp_path / "out"
    for folder in (first, second):
        export_checkpoint(folder, out, overwrite=True)
        assert_all_but_weights_survive(before, out)
    export_checkpoint(first, out, overwrite=True, dtype=torch.bfloat16)
    assert_all_but_weights_survive(before, out, torch_dtype="bfloat16")


def test_different_tokenizer_is_exported_with_its_end_token(tmp_path: Path) -> None:
    source = chat_folder(tmp_path / "source")
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    other.write_bytes(tokenizer_json("?", "one", "two", "three"))
    run_folder = trained(source, tmp_path / "run", f"data.tokenizer={other}")
    end = find_tokenizer(str(other)).end_id
    shutil.rmtree(other.parent)
    export_checkpoint(run_folder, tmp_path / "out")
    after = files_of(tmp_path / "out")
    assert after["tokenizer.json"] == tokenizer_json("?", "one", "two", "three")
    assert not after.keys() & {"chat_template.jinja", "merges.txt"}, "those of the other tokenizer"
    for name in ("config.json", "generation_config.json"):
        assert json.loads(after[name])["eos_token_id"] == [256, 258, end], "it stops where it did, and there"
    assert {key: json.loads(after["config.json"])[key] for key in TOKENS.keys() - {"eos_token_id"}} == {
        key: value for key, value in TOKENS.items() if key != "eos_token_id"
    }


def test_chat_template_of_the_run_replaces_the_folders(tmp_path: Path) -> None:
    source, own = chat_folder(tmp_path / "source"), tmp_path / "own.jinja"
    own.write_bytes(b"{{ messages[0].content }}")
    model_files = ModelFiles()
    model_files.files = read_model_files(source)
    model_files.tokenizer = read_tokenizer(str(source / "tokenizer.json"), str(own))
    before = files_of(source)
    ends = {258, 7}
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path / "out", turn_ends=ends, model_files=model_files)
    after = files_of(tmp_path / "out")
    assert before.keys() - after.keys() == {"additional_chat_templates/tool.jinja"}
    assert after["chat_template.jinja"] == own.read_bytes()
    assert json.loads(after["tokenizer_config.json"])["chat_template"] == own.read_text()
    for name in ("config.json", "generation_config.json"):
        assert json.loads(after[name])["eos_token_id"] == [256, 258, 7], "what ends a turn, beside what did before"
    changed = {"chat_template.jinja", "tokenizer_config.json", "config.json", "generation_config.json"}
    assert [name for name in after.keys() - changed if after[name] != before[name]] == []


def test_tokenizer_is_kept_for_random_weights_too(tmp_path: Path) -> None:
    file = tmp_path / "source" / "tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(tokenizer_json("?", "one"))
    (file.parent / "chat_template.jinja").write_bytes(BESIDE["chat_template.jinja"])
    own = ["model.vocab_size=263", "model.num_kv_heads=2", f"data.tokenizer={file}", "train.steps=1"]
    fitted(load_config("llama_small", tiny(*LIKE_TINY, *own, f"run.dir={tmp_path / 'run'}")))
    end = find_tokenizer(str(file)).end_id
    before = files_of(file.parent)
    shutil.rmtree(file.parent)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    after = files_of(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert json.loads(after["config.json"])["eos_token_id"] == end
    export_model(build(LLAMA, TINY), LLAMA, TINY, tmp_path / "out", overwrite=True)
    assert files_of(tmp_path / "out").keys() == {"config.json"}, "an export over an earlier one removes its files"
