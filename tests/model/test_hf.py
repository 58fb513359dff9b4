"""Any causal language model of transformers (`model.name=hf`): its logits, texts, weights, folder and configuration."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers import launch
from tests.helpers.cases import campaign_except
from tests.helpers.hf_models import KINDS, folder_of, load_with_transformers, overrides
from tests.helpers.tiny import lines
from trainer import (
    Sampling,
    Source,
    Trainer,
    TrainLoader,
    UserError,
    fill,
    generate_batch,
    load_config,
    load_weights,
    run,
)
from trainer.config.rules import check_config
from trainer.model.initial_weights import materialize
from trainer.model.tensor import find_plan
from trainer.registry import find_model

WHOLE_LOGITS = ("gemma2", "granite")
"""Models that change the output of their head: one caps it, one divides it."""
TRAINED = [kind for kind in KINDS if kind != "mamba"]
EVERYDAY = ("llama", "gemma3", "gpt2")
"""Plain; tied, two rotary embeddings, a window; learned positions."""

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that makes the folder of a kind once."""
    base, made = tmp_path_factory.mktemp("folders"), {}

    def find(kind: str, **changes: Any) -> Path:
        name = "-".join([kind, *(f"{key}={value}" for key, value in changes.items())])
        if name not in made:
            made[name] = folder_of(base / name, kind, **changes)
        return made[name]

    return find


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 257, (2, 24), generator=torch.Generator().manual_seed(1))


def config_of(folder: Path) -> Any:
    spec = find_model("hf")
    assert spec.resolve is not None
    return spec.resolve(spec.config(path=str(folder)))


def fresh_model(folder: Path) -> Any:
    """Return the unsharded model of a folder with random weights."""
    spec = find_model("hf")
    with torch.device("meta"):
        model = spec.build_model(config_of(folder))
    materialize(model, 0, torch.device("cpu"), spec.init)
    return model


def model_of(folder: Path) -> Any:
    """Return the unsharded model of a folder with its weights, as a run has it."""
    spec, config = find_model("hf"), config_of(folder)
    with torch.device("meta"):
        model = spec.build_model(config)
    materialize(model, 0, torch.device("cpu"), spec.init, is_loaded_later=lambda name: True)
    source = spec.initial_weights(config)
    assert source is not None
    fill(model, source)
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("kind", campaign_except([*TRAINED, "gpt_oss"], (*EVERYDAY, "gemma2", "qwen3_moe", "gpt_oss")))
def test_logits_and_loss_equal_those_of_transformers(kind: str, folders: Folders, tokens: torch.Tensor) -> None:
    """Also if logits are processed after the head: then the loss is not computed in chunks."""
    model, (there, _) = model_of(folders(kind)), load_with_transformers(folders(kind))
    assert isinstance(model, type(there))
    expected = there(input_ids=tokens).logits
    # Experts are computed by the trainer's own code, whose sums may be in another order if there are several threads.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if hasattr(there.config, "num_experts_per_tok") else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(model(tokens), expected, **tolerance)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, **tolerance)  # called as the library's own
    targets = torch.roll(tokens, -1, 1).index_fill_(1, torch.tensor([5, 23]), -100)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(model(tokens, targets)) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (type(model.lm_head).__name__ == "Linear") == (kind in WHOLE_LOGITS)


@pytest.mark.parametrize("kind", campaign_except([kind for kind in TRAINED if kind not in WHOLE_LOGITS], EVERYDAY))
def test_documents_in_a_row_are_isolated(kind: str, folders: Folders, tokens: torch.Tensor) -> None:
    model, one = model_of(folders(kind)), tokens[:1]
    documents = torch.tensor([[4] * 9 + [7] * 15])
    with torch.no_grad():
        packed, apart = model(one, documents=documents), [model(one[:, :9]), model(one[:, 9:])]
        assert not torch.allclose(model(one)[:, 9:], apart[1], rtol=1e-2, atol=1e-2), "they would be seen"
    assert torch.allclose(packed, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)


class Packed(Source):
    """Samples of two documents each."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.vocab_size = seq_len, 257

    def __len__(self) -> int:
        return 100

    def batch(self, indices: Any) -> dict[str, Any]:
        shape = (len(indices), self.seq_len)
        tokens = np.resize(np.arange(257), shape)
        documents = np.broadcast_to(np.arange(shape[1]) // 20, shape).copy()
        return {"tokens": tokens, "targets": tokens, "documents": documents}


class OnPacked(Trainer):
    """Trains on them."""

    def build_loader(self) -> TrainLoader:
        source = Packed(self.config.data.seq_len)
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)


def test_model_that_mixes_documents_is_rejected_before_training(folders: Folders, tmp_path: Path) -> None:
    """Its layers have a state that goes on from one document to the next; the first of them is named."""
    trainer = OnPacked(load_config("llama_small", overrides(folders("mamba"), f"run.dir={tmp_path / 'run'}")))
    with pytest.raises(UserError) as refused:
        trainer.fit()
    trainer.close()
    assert str(refused.value).startswith("data.documents=masked: ")
    assert "backbone.layers.1.mixer" in str(refused.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_padding_token_is_trained_as_in_native_models(tied: bool, folders: Folders) -> None:
    """In many chat models it is the token that ends each turn."""
    folder = folders("llama", pad_token_id=7, tie_word_embeddings=tied)
    theirs = model_of(folder).requires_grad_(True)
    ours = load_weights(folder).requires_grad_(True)
    assert type(ours).__name__ != type(theirs).__name__
    tokens = torch.tensor([[3, 7, 7, 5, 9, 7, 2, 7]])
    for model in (ours, theirs):
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    found = theirs.get_input_embeddings().weight.grad
    assert found[7].abs().sum() > 0
    torch.testing.assert_close(ours.tok_embeddings.weight.grad, found, rtol=1e-4, atol=1e-6)


def test_generated_text_equals_that_of_transformers(folders: Folders, tokens: torch.Tensor) -> None:
    """With transformers' own method, and with `generate_batch`, which uses transformers' cache."""
    model, (there, _) = model_of(folders("qwen3")), load_with_transformers(folders("qwen3"))
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = there.generate(tokens[:1], **how)
    assert torch.equal(model.generate(tokens[:1], **how), expected)
    assert generate_batch(model, [tokens[0].tolist()], 8)[0].tokens == expected[0, -8:].tolist()


@pytest.mark.parametrize("kind", campaign_except(["gemma3", "qwen3", "gpt2"], ["gemma3"]))
def test_texts_of_a_batch_equal_those_generated_alone(kind: str, folders: Folders) -> None:
    """With transformers' cache, prompts of different lengths, and texts that end at different tokens."""
    model = model_of(folders(kind))
    prompts, ends = [[5], [5, 99, 17, 3, 140], [9] * 12, [88, 2]], {*range(60, 75)}
    together = generate_batch(model, prompts, 20, Sampling(), seed=3, ends=ends)
    for index, prompt in enumerate(prompts):
        (alone,) = generate_batch(model, [prompt], 20, Sampling(), seed=3, indices=[index], ends=ends)
        assert together[index].tokens == alone.tokens
        assert together[index].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({len(text.tokens) for text in together}) > 1


def test_flops_count_the_experts_that_a_token_goes_to(folders: Folders) -> None:
    spec, config = find_model("hf"), config_of(folders("qwen3_moe"))
    assert spec.flops is not None
    attention, expert, scores = 48 * 16 * (2 * 4 + 2 * 2), 3 * 48 * 32, 2 * (4 * 16) * 32 / 2
    assert spec.flops(config, 32) == 6 * (2 * (attention + 2 * expert + 48 * 4 + scores) + 48 * 257)
    assert spec.flops(config_of(folders("mamba")), 32) > 0, "it has no attention"
    windowed = config_of(folders("mistral"))
    assert spec.flops(windowed, 64) - spec.flops(windowed, 16) == 6 * 2 * 2 * 48 * ((16 - 16**2 / 128) - 8)


# ---------------------------------------------------------------------------------------------------------------
# Weights


def test_rows_of_stacked_experts_are_those_of_transformers(folders: Folders) -> None:
    """Which stacks them when it loads a folder; here only the rows of a rank's experts are read."""
    source = find_model("hf").initial_weights(config_of(folders("qwen3_moe")))
    assert source is not None
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = load_with_transformers(folders("qwen3_moe"))[0].state_dict()[name]
    assert torch.equal(source.read(name, 1, 3), whole[1:3])


def test_random_weights_are_drawn_as_transformers_draws_them(folders: Folders) -> None:
    """GPT-2's residual projections are drawn a second time, by the block that contains them."""
    weights = dict(fresh_model(folders("gpt2", n_embd=96)).named_parameters())
    assert weights["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert weights["transformer.h.1.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["transformer.h.1.ln_1.weight"].eq(1).all()
    table = fresh_model(folders("llama", pad_token_id=7)).get_input_embeddings().weight
    assert table[7].eq(0).all(), "the row of the padding token"
    assert table[6].ne(0).any()


def test_added_modules_initialize_themselves(folders: Folders) -> None:
    """Such as those of an adapter."""

    class Added(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            torch.nn.init.constant_(self.weight, 5.0)

    spec = find_model("hf")
    with torch.device("meta"):
        model: Any = spec.build_model(config_of(folders("llama")))
        model.model.layers[0].added = Added()
    materialize(model, 0, torch.device("cpu"), spec.init)
    assert model.model.layers[0].added.weight.eq(5.0).all()
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_folder_without_weights_gets_random_ones(folders: Folders, tmp_path: Path) -> None:
    shutil.copy(folders("llama") / "config.json", tmp_path)
    assert config_of(tmp_path).fresh
    assert find_model("hf").initial_weights(config_of(tmp_path)) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert not config_of(tmp_path).fresh
    with pytest.raises(UserError, match=r"^model\.path=") as refused:
        load_config("llama_small", [*overrides(tmp_path), f"run.dir={tmp_path / 'run'}"])
    assert "pytorch_model.bin" in str(refused.value)


def test_run_does_not_need_its_model_folder_after_the_start(folders: Folders, tmp_path: Path) -> None:
    """The model's configuration is stored in config.yaml, which works as a recipe without the folder."""
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    more = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "checkpoint.every=1"]
    config = load_config("llama_small", overrides(source, *more))
    for steps in (1, 2):
        trainer = Trainer(config)
        assert trainer.fit() == 0
        trainer.close()
        shutil.rmtree(source, ignore_errors=True)
        config = load_config(str(tmp_path / "run"), [f"train.steps={steps + 1}"])
    assert [line["step"] for line in lines(tmp_path / "run") if line["kind"] == "train"] == [1, 2]
    source.mkdir()
    shutil.copy(folders("qwen3") / "config.json", source)
    with pytest.raises(UserError, match=r"^model\.path=") as refused:
        load_config(str(tmp_path / "run"))
    assert "model_type" in str(refused.value), "another model is there now"


# ---------------------------------------------------------------------------------------------------------------
# The configuration


def test_auto_uses_the_native_recipe_if_it_builds_the_model(folders: Folders) -> None:
    def settled(folder: Path, *more: str) -> Any:
        return load_config("llama_small", overrides(folder, *more, name="auto"))

    native = settled(folders("llama"))
    assert (native.model.name, native.model.dim, native.train.init_from) == ("llama", 48, str(folders("llama")))
    assert settled(folders("llama"), "model.fresh=true").train.init_from is None
    assert settled(folders("llama"), "model.attention=eager").model.name == "hf", "it has no such key"
    assert settled(folders("llama", attention_bias=True)).model.name == "hf", "it builds no such thing"
    assert settled(folders("mistral")).model.path == str(folders("mistral"))
    assert load_weights(folders("mistral")).config.model_type == "mistral"


def test_tokenizer_of_the_folder_is_used(folders: Folders, tmp_path: Path) -> None:
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    for name in ("hf", "auto"):
        config = load_config("llama_small", overrides(source, "data.tokenizer=model", name=name))
        assert config.data.tokenizer == str(source / "tokenizer.json")


@pytest.mark.parametrize(
    ("entries", "override", "setting"),
    [
        ({}, "model.path", "model.path=null"),  # none is given
        ({}, "model.path=nowhere", "model.path="),
        ({}, "model.attention=flashy", "model.attention=flashy"),
        ({}, "model.attention=flash_attention_2", "model.attention=flash_attention_2"),
        ({}, "train.init_from=elsewhere", "train.init_from=elsewhere"),
        ({}, "data.seq_len=129", "data.seq_len=129"),
        ({"model_type": "lama"}, "", "model.path="),
        ({"quantization_config": {"bits": 4}}, "", "model.path="),
        ({"num_hidden_layers": 3}, "", "model.name=hf"),
    ],
    ids=str,
)
def test_mistakes_name_their_setting(
    entries: dict[str, Any],
    override: str,
    setting: str,
    folders: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | entries))
    given = [item for item in overrides(source) if item.partition("=")[0] != override.partition("=")[0]]
    given += [override] if "=" in override else []
    capsys.readouterr()  # the library shows its progress in writing the folder
    assert run.main(["recipe=llama_small", *given, f"run.dir={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {setting}"), printed
    assert all(entry in printed for entry in entries if entry == "quantization_config"), printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("installed", ["", "4.57.1"])
def test_without_the_library_it_is_one_message(
    installed: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    spec, config = find_model("hf"), config_of(folders("llama"))
    assert spec.check is not None
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError) as refused:
        spec.check(config)
    assert installed in str(refused.value)
    assert "transformers" in str(refused.value)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "feature",
    [
        "train.activation_checkpoint=full",
        "train.activation_checkpoint=selective",
        "train.activation_checkpoint=budget:0.3",
        "train.activation_checkpoint=auto",
        "train.micro_batch_size=auto",
        "fsdp.wrap=size:20000",
        "fsdp.accumulate=sharded",
        "train.compile=true",
        "model.attention=eager",
    ],
)
def test_options_of_training_do_not_change_losses(kind: str, feature: str, folders: Folders, tmp_path: Path) -> None:
    losses = [
        launch.run(tmp_path / name, "recipe=llama_small", *overrides(folders(kind), *own), "nproc=2").train("loss")
        for name, own in (("plain", []), ("run", [feature]))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt2", "ships no plan for it"),
        ("phi3", r"splits model\.layers\.\*\.self_attn\.qkv_proj by 'colwise_gather_output'"),
        ("qwen3_moe", r"splits model\.layers\.\*\.mlp\.experts\.gate_up_proj by 'packed_colwise'"),
    ],
)
def test_plans_that_cannot_be_translated_are_refused_by_name(folders: Folders, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^mesh\.tensor=2: model_type={kind}: .*{message}"):
        find_plan(fresh_model(folders(kind)), find_model("hf"), 2)


def test_plan_that_does_not_name_a_matrix_is_refused(folders: Folders) -> None:
    model = fresh_model(folders("llama"))
    model.model.layers[1].self_attn.extra = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"does not name model\.layers\.1\.self_attn\.extra\.weight"):
        find_plan(model, find_model("hf"), 2)


@pytest.mark.parametrize(("tensor", "heads"), [(4, "num_key_value_heads=2"), (8, "num_attention_heads=4")])
def test_ranks_that_would_share_a_head_are_refused(folders: Folders, tensor: int, heads: str) -> None:
    config = load_config("llama_small", overrides(folders("llama"), f"mesh.tensor={tensor}"))
    with pytest.raises(
        UserError, match=rf"^mesh\.tensor={tensor}: must divide {heads}: each rank computes whole heads"
    ):
        check_config(config, tensor, tensor)


def test_dropout_between_layers_that_share_tokens_is_refused(folders: Folders) -> None:
    model = fresh_model(folders("granite"))
    model.config.residual_dropout = 0.1
    with pytest.raises(UserError, match=r"different elements of the same hidden states with residual_dropout=0\.1"):
        find_plan(model, find_model("hf"), 2)
    model.config.residual_dropout = 0.0
    model.config.attention_dropout = 0.1  # of each rank's own heads
    assert find_plan(model, find_model("hf"), 2)
