"""The source of initial weights declares the model, and a later export includes the files that came with it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_command, tiny_overrides
from tests.weights.test_huggingface import GPT2, LLAMA, STRETCHED, TINY, Memory, build
from trainer import Trainer, UserError, load_config, load_weights, run
from trainer.config.location import locate
from trainer.data.tokenizer import find_tokenizer
from trainer.export import command_line as main
from trainer.recipe import Recipe
from trainer.weights.exporting import ModelFiles, export, read_model_files, read_tokenizer
from trainer.weights.sources import StateDictFile

LIKE_TINY = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=2", "train.micro_batch_size=2"]
SOURCE = replace(TINY, **STRETCHED, norm_eps=1e-6, init_std=0.05)
"""A Llama 3.1 whose fields are neither the defaults nor those of llama_small."""


def folder_of(path: Path, recipe: Recipe = LLAMA, config: Any = SOURCE, **changes: Any) -> Path:
    """Write a model in Hugging Face's format; `changes` of config.json, where None removes a key."""
    export(Memory(build(recipe, config).state_dict()), recipe, config, path)
    edit(path, **changes)
    return path


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def config_of(source: Path | str, *overrides: str, recipe: str = "llama_small") -> Any:
    shapeless = [item for item in tiny_overrides(*LIKE_TINY) if not item.startswith("model.")]
    return load_config(recipe, [*shapeless, f"train.init_from={source}", "train.steps=1", *overrides])


def trained(source: Path | str, folder: Path, *overrides: str, recipe: str = "llama_small") -> Path:
    """Train one step from `source` and return the run's folder."""
    trainer = Trainer(config_of(source, f"run.dir={folder}", *overrides, recipe=recipe))
    assert trainer.fit() == 0
    trainer.close()
    return folder


# ---------------------------------------------------------------------------------------------------------------
# What a path names


def test_kind_of_a_path_follows_from_its_files(tmp_path: Path) -> None:
    """A folder with a checkpoint is a checkpoint, even if it also has model files or is damaged."""
    files = {
        "huggingface": ["config.json"],
        "huggingface with shards": ["model-00001-of-00002.safetensors"],
        "checkpoint": ["manifest.json", "config.json", "model.safetensors"],
        "checkpoint that is damaged": ["layout.json"],
        "run": ["config.yaml", "status.json"],
        "run.pt": [],
    }
    for folder, names in files.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
        assert locate(tmp_path / folder).kind == folder.split()[0].split(".")[0]
        assert locate(f"file://{tmp_path / folder}") == locate(str(tmp_path / folder))
    assert locate("weights.pt").kind == locate("s3://bucket/weights.safetensors").kind == "file"
    assert locate("nowhere").kind == locate("s3://bucket/run").kind == locate(tmp_path / "run" / "best").kind == "run"
    assert locate(tmp_path / "run" / "best").folder == locate(tmp_path / "run").folder == tmp_path / "run"


def test_wrapper_prefixes_are_removed(tmp_path: Path) -> None:
    wrappers = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "layers.0._checkpoint_wrapped_module.")
    torch.save({f"{wrapper}w{n}": torch.ones(n) for n, wrapper in enumerate(wrappers)}, tmp_path / "weights.pt")
    shapes = StateDictFile(tmp_path / "weights.pt", "train.init_from").shapes
    assert shapes == {"w0": (0,), "w1": (1,), "w2": (2,), "layers.0.w3": (3,)}


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


def test_training_starts_with_the_folders_loss(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    trainer = Trainer(config_of(source, f"run.dir={tmp_path / 'run'}"))
    trainer.load_checkpoint()
    batch = next(iter(trainer.loader))
    with torch.no_grad():
        logits = load_weights(source)(batch["tokens"])
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        found = trainer.loss(batch)
    trainer.close()
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("override", "legal"),
    [
        ("model.rope_theta=500000", "model.rope_theta=10000.0"),
        ("model.rope_factor=1", "model.rope_factor=8.0"),
        ("model.norm_eps=0.1", "model.norm_eps=1e-06"),
        ("model.num_heads=8", "model.num_heads=4"),
        ("model.num_kv_heads=4", "model.num_kv_heads=2"),
        ("model.dim=64", "model.dim=32"),
        ("model.max_seq_len=1024", "model.max_seq_len=512"),
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
    key = override.partition("=")[0]
    assert re.search(rf"^error: {re.escape(key)}=\S+: {re.escape(str(source))}/config.json says", said), said
    assert f"nearest legal value: {legal}" in said
    assert not (tmp_path / "run").exists()


def test_all_disagreements_are_named_at_once(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    with pytest.raises(UserError) as refused:
        config_of(source, "model.norm_eps=0.1", "model.num_heads=8")
    lines = str(refused.value).splitlines()
    assert [line.partition("=")[0] for line in lines[0:4:2]] == ["model.num_heads", "model.norm_eps"]
    assert "checkpoint.allow_changes=[model.num_heads,model.norm_eps]" in lines[-1]


@pytest.mark.slow
def test_settings_that_may_differ_from_the_folder(tmp_path: Path) -> None:
    """Such as a longer context, and settings of training only, such as dropout."""
    source = folder_of(tmp_path / "source")
    longer = ["model.rope_theta=500000", "checkpoint.allow_changes=[model.rope_theta]"]
    assert config_of(source, *longer).model == replace(config_of(source).model, rope_theta=500000.0)
    trained(source, tmp_path / "run", *longer)
    again = load_config(str(tmp_path / "run" / "config.yaml"))
    assert again.model.rope_theta == 500000.0

    small = GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64, dropout=0.2)
    other = folder_of(tmp_path / "gpt2", GPT2, small)
    assert config_of(other, recipe="gpt2").model.dropout == 0.2
    assert config_of(other, "model.dropout=0.0", recipe="gpt2").model.dropout == 0.0


def test_different_kind_of_model_is_rejected_by_name(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    with pytest.raises(UserError, match=r"^model\.name=gpt2: .*config\.json: model_type=llama(.|\n)*model\.name=llama"):
        config_of(source, recipe="gpt2")


def test_configuration_built_in_code_is_compared_too(tmp_path: Path) -> None:
    """One that did not come from `load_config`, and a folder that has changed since."""
    source = folder_of(tmp_path / "source")
    config = config_of(source, f"run.dir={tmp_path / 'run'}")
    other = replace(config, model=replace(config.model, rope_theta=500000.0))
    trainer = Trainer(other)
    with pytest.raises(UserError, match=r"^model\.rope_theta=500000\.0: .*/config\.json says 10000\.0"):
        trainer.load_checkpoint()
    trainer.close()


@pytest.mark.slow
def test_run_declares_its_model_like_a_folder(tmp_path: Path) -> None:
    first = trained(folder_of(tmp_path / "source"), tmp_path / "first")
    for source in (first, first / "checkpoints" / "step_00000001"):
        assert config_of(source).model == config_of(tmp_path / "source").model
        with pytest.raises(UserError, match=r"^model\.rope_theta=7\.0: .*/config\.yaml says 10000\.0"):
            config_of(source, "model.rope_theta=7")
    config = config_of(first, f"run.dir={tmp_path / 'run'}")
    (first / "config.yaml").unlink()  # the checkpoint has its own
    trainer = Trainer(replace(config, model=replace(config.model, norm_eps=0.1)))
    with pytest.raises(UserError, match=r"^model\.norm_eps=0\.1: .*step_00000001/config\.yaml says 1e-06"):
        trainer.load_checkpoint()
    trainer.close()


@pytest.mark.slow
def test_folder_without_config_json_gets_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source")
    shape = [f"model.{name}={getattr(SOURCE, name)}" for name in ("rope_theta", "vocab_size", "dim", "num_layers")]
    shape += [f"model.{name}={getattr(SOURCE, name)}" for name in ("num_heads", "num_kv_heads", "ffn_dim")]
    (source / "config.json").unlink()
    trained(source, tmp_path / "run", *shape)
    assert f"{source} has no config.json" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------
# What comes with it, and leaves with it


TOKENS = {"eos_token_id": [256, 258], "bos_token_id": 258, "pad_token_id": 257, "summary_type": "cls_index"}
BESIDE = {
    "generation_config.json": b'{"eos_token_id": [256, 258],\n "temperature":0.6, "bos_token_id": 258}',
    "tokenizer_config.json": b'{"eos_token": "<|im_end|>",  "chat_template": "{{ messages }}"}\n',
    "special_tokens_map.json": b'{"eos_token": "<|im_end|>"}',
    "chat_template.jinja": b"{% for m in messages %}\xc3\xa9{% endfor %}\r\n",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "merges.txt": b"#version: 0.2\n",
    "added_tokens.json": b"",
}
"""What no training changes: bytes that no program would write again."""


def tokenizer_json(*words: str) -> bytes:
    vocab = {word: number for number, word in enumerate([*words, "<|im_end|>", "<|endoftext|>"])}
    added = [{"id": vocab[name], "content": name, "special": True} for name in ("<|im_end|>", "<|endoftext|>")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    keys = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    content = {"version": "1.0", **dict.fromkeys(keys), "added_tokens": [{**t, **flags} for t in added], "model": model}
    return json.dumps(content).encode()


def chat_folder(path: Path, recipe: Recipe = LLAMA, config: Any = SOURCE) -> Path:
    folder_of(path, recipe, config, exported_by=None, **TOKENS)
    for name, content in (BESIDE | {"tokenizer.json": tokenizer_json("?", "one", "two")}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


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


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_files_that_training_does_not_change_are_exported_unchanged(tokenizer: bool, tmp_path: Path) -> None:
    """Also if the folder was deleted long before, and after a resume without it."""
    source = chat_folder(tmp_path / "source")
    before = files_of(source)
    own = [f"data.tokenizer={source}/tokenizer.json"] if tokenizer else []
    first = trained(source, tmp_path / "first", *own)
    source.rename(tmp_path / "gone")
    goes_on = [f"run.dir={first}", "train.steps=2", "train.init_from=null"]
    trainer = Trainer(load_config(str(first / "config.yaml"), goes_on))
    assert (trainer.fit(), trainer.resume.step) == (0, 1)
    trainer.close()
    assert main([str(first / "checkpoints" / "step_00000002"), str(tmp_path / "out")]) == 0
    assert_all_but_weights_survive(before, tmp_path / "out")
    assert main([str(first), str(tmp_path / "out"), "--overwrite", "--dtype", "bfloat16"]) == 0
    assert_all_but_weights_survive(before, tmp_path / "out", dtype="bfloat16", torch_dtype="bfloat16")


@pytest.mark.slow
def test_files_of_a_model_are_passed_from_run_to_run(tmp_path: Path) -> None:
    source = chat_folder(tmp_path / "source")
    second = trained(trained(source, tmp_path / "first"), tmp_path / "second")
    assert main([str(second), str(tmp_path / "out")]) == 0
    assert_all_but_weights_survive(files_of(source), tmp_path / "out")
    third = trained(tmp_path / "out", tmp_path / "third")
    assert main([str(third), str(tmp_path / "again")]) == 0
    assert_all_but_weights_survive(files_of(tmp_path / "out"), tmp_path / "again")


@pytest.mark.slow
def test_files_of_a_model_survive_a_change_of_ranks(tmp_path: Path) -> None:
    """Saved by two, resumed by one, exported from either."""
    source = chat_folder(tmp_path / "source")
    before = files_of(source)
    shapeless = [item for item in tiny_overrides(*LIKE_TINY) if not item.startswith("model.")]
    own = ["recipe=llama_small", *shapeless, "train.micro_batch_size=1", f"data.tokenizer={source}/tokenizer.json"]
    own = [item for item in own if item != "train.micro_batch_size=2"]
    ran = run_command(tmp_path / "run", *own, f"train.init_from={source}", "train.steps=1", "nproc=2")
    assert ran.exit_code == 0, ran.stderr
    shutil.rmtree(source)
    trainer = Trainer(load_config(str(tmp_path / "run" / "config.yaml"), ["train.steps=2", "train.init_from=null"]))
    assert (trainer.fit(), trainer.resume.step) == (0, 1)
    trainer.close()
    for step in (1, 2):
        assert main([str(tmp_path / "run" / "checkpoints" / f"step_0000000{step}"), str(tmp_path / f"out{step}")]) == 0
        assert_all_but_weights_survive(before, tmp_path / f"out{step}")


@pytest.mark.slow
def test_an_older_spelling_of_config_json_is_kept(tmp_path: Path) -> None:
    """Entries of transformers 4, and no others."""
    source = chat_folder(tmp_path / "source")
    edit(source, rope_parameters=None, dtype=None, _name_or_path="x/é", transformers_version="4.44.0")
    assert main([str(trained(source, tmp_path / "run")), str(tmp_path / "out")]) == 0
    assert_all_but_weights_survive(files_of(source), tmp_path / "out")


@pytest.mark.slow
def test_changed_settings_are_in_the_exported_config(tmp_path: Path) -> None:
    source = chat_folder(tmp_path / "source")
    changed = ["model.rope_theta=70000", "checkpoint.allow_changes=[model.rope_theta]"]
    assert main([str(trained(source, tmp_path / "run", *changed)), str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["rope_theta"], content["rope_parameters"]["rope_theta"]) == (70000.0, 70000.0)
    assert {key: content[key] for key in TOKENS} == TOKENS


@pytest.mark.slow
def test_different_tokenizer_is_exported_with_its_end_token(tmp_path: Path) -> None:
    source = chat_folder(tmp_path / "source")
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    other.write_bytes(tokenizer_json("?", "one", "two", "three"))
    run_folder = trained(source, tmp_path / "run", f"data.tokenizer={other}")
    end = find_tokenizer(str(other)).end_id
    shutil.rmtree(other.parent)
    assert main([str(run_folder), str(tmp_path / "out")]) == 0
    after = files_of(tmp_path / "out")
    assert after["tokenizer.json"] == tokenizer_json("?", "one", "two", "three")
    assert "chat_template.jinja" not in after
    assert "merges.txt" not in after
    for name in ("config.json", "generation_config.json"):
        assert json.loads(after[name])["eos_token_id"] == [256, 258, end], "it stops where it did, and there"


def test_chat_template_of_the_run_replaces_the_folders(tmp_path: Path) -> None:
    source = chat_folder(tmp_path / "source")
    (tmp_path / "own.jinja").write_bytes(b"{{ messages[0].content }}")
    model_files = ModelFiles()
    model_files.files = read_model_files(source)
    model_files.tokenizer = read_tokenizer(str(source / "tokenizer.json"), str(tmp_path / "own.jinja"))
    before = files_of(source)
    export(
        Memory(build(LLAMA, TINY).state_dict()),
        LLAMA,
        TINY,
        tmp_path / "out",
        turn_ends={258, 7},
        model_files=model_files,
    )
    after = files_of(tmp_path / "out")
    assert before.keys() - after.keys() == {"additional_chat_templates/tool.jinja"}
    assert after["chat_template.jinja"] == b"{{ messages[0].content }}"
    assert json.loads(after["tokenizer_config.json"])["chat_template"] == "{{ messages[0].content }}"
    assert json.loads(after["config.json"])["eos_token_id"] == [256, 258, 7], "what ends a turn, beside what did before"
    assert json.loads(after["generation_config.json"])["eos_token_id"] == [256, 258, 7]
    changed = {"chat_template.jinja", "tokenizer_config.json", "config.json", "generation_config.json"}
    assert all(after[name] == before[name] for name in after.keys() - changed)


@pytest.mark.slow
def test_tokenizer_is_kept_for_every_source_of_weights(tmp_path: Path) -> None:
    file = tmp_path / "source" / "tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(tokenizer_json("?", "one"))
    (file.parent / "chat_template.jinja").write_bytes(BESIDE["chat_template.jinja"])
    own = ["model.vocab_size=263", "model.num_kv_heads=2", f"data.tokenizer={file}", "train.steps=1"]
    trainer = Trainer(load_config("llama_small", tiny_overrides(*LIKE_TINY, *own, f"run.dir={tmp_path / 'run'}")))
    assert trainer.fit() == 0
    trainer.close()
    end = find_tokenizer(str(file)).end_id
    before = files_of(file.parent)
    shutil.rmtree(file.parent)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    after = files_of(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert json.loads(after["config.json"])["eos_token_id"] == end


@pytest.mark.slow
def test_export_over_a_previous_one_removes_its_files(tmp_path: Path) -> None:
    assert main([str(trained(chat_folder(tmp_path / "source"), tmp_path / "run")), str(tmp_path / "out")]) == 0
    export(Memory(build(LLAMA, TINY).state_dict()), LLAMA, TINY, tmp_path / "out", overwrite=True)
    assert files_of(tmp_path / "out").keys() == {"config.json"}


@pytest.mark.parametrize("name", ["tok.json", "tokenizer.json"])
def test_missing_tokenizer_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be bytes, or the path of"):
        read_tokenizer(str(tmp_path / name))
