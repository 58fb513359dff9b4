"""Any causal language model of transformers (`model.name=hf`), compared with transformers and with a plain loop."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers.hf_models import KINDS, folder_of, load_with_transformers, plain_losses
from tests.helpers.launch import Run, on_ranks, start
from tests.helpers.tiny import full
from trainer import Source, Trainer, TrainLoader, UserError, fill, load_config, load_weights, run
from trainer.export import command_line as export
from trainer.model.materialize import materialize
from trainer.model.sample import Sampling, generate_batch
from trainer.recipe import find_recipe

LR = 1e-3
STEPS = 20
WHOLE_LOGITS = ("gemma2", "granite")
"""Models that change the output of their head: one caps it, one divides it."""
TRAINED = [kind for kind in KINDS if kind != "mamba"]
TRIED = ("llama", "gemma3", "gpt2")
"""Kinds that are in `make test-fast`: plain; tied, two rotary embeddings, a window; learned positions."""


def kinds(of: list[str], everyday: tuple[str, ...]) -> list[Any]:
    return [pytest.param(kind, marks=[] if kind in everyday else pytest.mark.campaign) for kind in of]


SETTINGS = [
    *("data.source=synthetic", "data.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=1"),
    *(f"optim.lr={LR}", "optim.weight_decay=0", "optim.max_grad_norm=null", "schedule.name=constant"),
    *("schedule.warmup_steps=0", "eval.every=0", "checkpoint.every=0", "log.every=1", "log.sample_tokens=0"),
    *("run.threads=1", f"train.steps={STEPS}"),
]
"""A run that a plain loop can follow."""


def overrides(folder: Path, *more: str, name: str = "hf") -> list[str]:
    given = {item.partition("=")[0] for item in more}
    kept = [item for item in SETTINGS if item.partition("=")[0] not in given]
    return [f"model.name={name}", f"model.path={folder}", *kept, *more]


def trained(folder: Path, out: Path, *more: str) -> Run:
    ran = start(out, "recipe=llama_small", *overrides(folder, *more)).wait()
    assert ran.code == 0, ran.err + ran.out
    return ran


def global_batches(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return what each step trains on, by a loader on one rank."""
    trainer = Trainer(load_config("llama_small", overrides(folder, "run.dir=unused", "train.micro_batch_size=8")))
    batches = [batch for batch, _ in zip(trainer.loader, range(STEPS), strict=False)]
    trainer.close()
    return batches


def relative(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=[] if (kind, ranks) == ("gemma3", 2) else pytest.mark.campaign)
        for kind in TRAINED
        for ranks in (1, 2, 4)
    ],
)
def test_training_and_export_equal_a_plain_loop(kind: str, ranks: int, tmp_path: Path) -> None:
    """First loss and 20 steps; transformers loads the export without a warning and with the same weights."""
    source = folder_of(tmp_path / "source", kind)
    expected, model = plain_losses(source, global_batches(source), LR)
    ran = trained(source, tmp_path / "run", f"nproc={ranks}", *(["mesh.replicate=2"] if ranks == 4 else []))
    assert relative(ran.train("loss"), expected) < 1e-6
    shutil.move(source, tmp_path / "gone")

    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    there, report = load_with_transformers(tmp_path / "out")
    assert not any(report.values()), report
    assert type(there) is type(model)
    here = load_weights(tmp_path / "run").state_dict()
    assert list(here) == list(there.state_dict())
    assert all(torch.equal(here[name], weight) for name, weight in there.state_dict().items())
    for file in (tmp_path / "gone").iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    stored = [sorted(_names(folder)) for folder in (tmp_path / "gone", tmp_path / "out")]
    assert stored[0] == stored[1], "tensors are named and split as those of the library"
    assert f"hf, {type(model).__name__} from" in ran.out
    assert ("whole logits" in ran.out) == (kind in WHOLE_LOGITS)


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


# ---------------------------------------------------------------------------------------------------------------
# The model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes the folder of a kind once."""
    base, made = tmp_path_factory.mktemp("folders"), {}

    def find(kind: str, **changes: Any) -> Path:
        name = "-".join([kind, *changes])
        if name not in made:
            made[name] = folder_of(base / name, kind, **changes)
        return made[name]

    return find


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 257, (2, 24), generator=torch.Generator().manual_seed(1))


def config_of(folder: Path) -> Any:
    recipe = find_recipe("hf")
    assert recipe.resolve is not None
    return recipe.resolve(recipe.config(path=str(folder)))


def model_of(folder: Path) -> Any:
    """Return the unsharded model of a folder, as a run has it."""
    recipe, config = find_recipe("hf"), config_of(folder)
    with torch.device("meta"):
        model = recipe.build_model(config)
    materialize(model, 0, torch.device("cpu"), recipe.init, is_loaded_later=lambda name: True)
    source = recipe.initial_weights(config)
    assert source is not None
    fill(model, source)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_token_is_trained_as_in_native_models(tied: bool, folders: Any) -> None:
    """In many chat models it is the token that ends each turn."""
    folder = folders("llama", pad_token_id=7, tie_word_embeddings=tied)
    theirs = model_of(folder).requires_grad_(True)
    ours = load_weights(folder).requires_grad_(True)
    assert type(ours).__name__ != type(theirs).__name__
    tokens = torch.tensor([[3, 7, 7, 5, 9, 7, 2, 7]])
    for model in (ours, theirs):
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    table = theirs.get_input_embeddings()
    assert table.padding_idx is None
    assert table.weight.grad[7].abs().sum() > 0
    torch.testing.assert_close(ours.tok_embeddings.weight.grad, table.weight.grad, rtol=1e-4, atol=1e-6)


def test_padding_row_of_a_new_model_equals_transformers(folders: Any) -> None:
    recipe, config = find_recipe("hf"), config_of(folders("llama", pad_token_id=7))
    with torch.device("meta"):
        model = recipe.build_model(config)
    materialize(model, 0, torch.device("cpu"), recipe.init)
    table = model.get_input_embeddings()  # type: ignore[operator]
    assert table.weight[7].eq(0).all()
    assert table.weight[6].ne(0).any()
    assert table.padding_idx is None


@pytest.mark.parametrize("kind", kinds(TRAINED, (*TRIED, "gemma2", "qwen3_moe")))
def test_logits_and_loss_equal_those_of_transformers(kind: str, folders: Any, tokens: torch.Tensor) -> None:
    """Also if logits are processed after the head: then the loss is not computed in chunks."""
    model, (there, _) = model_of(folders(kind)), load_with_transformers(folders(kind))
    assert isinstance(model, type(there))
    expected = there(input_ids=tokens).logits
    assert torch.equal(model(tokens), expected)
    assert torch.equal(model(input_ids=tokens).logits, expected), "called as the library's own"
    targets = torch.roll(tokens, -1, 1).index_fill_(1, torch.tensor([5, 23]), -100)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(model(tokens, targets)) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (type(model.lm_head).__name__ == "Linear") == (kind in WHOLE_LOGITS)


@pytest.mark.parametrize("kind", kinds([kind for kind in TRAINED if kind not in WHOLE_LOGITS], TRIED))
def test_documents_in_a_row_are_isolated(kind: str, folders: Any, tokens: torch.Tensor) -> None:
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
        return {
            "tokens": tokens,
            "targets": tokens,
            "documents": np.broadcast_to(np.arange(shape[1]) // 20, shape).copy(),
        }


class OnPacked(Trainer):
    """Trains on them."""

    def build_loader(self) -> TrainLoader:
        source = Packed(self.config.data.seq_len)
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_model_that_mixes_documents_is_rejected_before_training(kind: str, folders: Any, tmp_path: Path) -> None:
    trainer = OnPacked(load_config("llama_small", overrides(folders(kind), f"run.dir={tmp_path}", "train.steps=1")))
    if kind == "llama":
        assert trainer.fit() == 0
    else:
        rule = "data.documents=masked: model.name=hf lets documents in one row influence each other: through "
        with pytest.raises(UserError, match=f"^{re.escape(rule)}backbone.layers.1.mixer"):
            trainer.fit()
        assert not list(tmp_path.iterdir())
    trainer.close()


def test_generated_text_equals_that_of_transformers(folders: Any, tokens: torch.Tensor) -> None:
    """With transformers' own method, and with `trainer.generate`, which uses transformers' cache."""
    model, (there, _) = model_of(folders("qwen3")), load_with_transformers(folders("qwen3"))
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = there.generate(tokens[:1], **how)
    assert torch.equal(model.generate(tokens[:1], **how), expected)
    assert generate_batch(model, [tokens[0].tolist()], 8)[0].tokens == expected[0, -8:].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma3"])
def test_texts_of_a_batch_equal_those_generated_alone(kind: str, folders: Any) -> None:
    """With transformers' cache, prompts of different lengths, and texts that end at different tokens."""
    model = model_of(folders(kind))
    prompts, ends = [[5], [5, 99, 17, 3, 140], [9] * 12, [88, 2]], {*range(60, 75)}
    together = generate_batch(model, prompts, 20, Sampling(), seed=3, ends=ends)
    for index, prompt in enumerate(prompts):
        (alone,) = generate_batch(model, [prompt], 20, Sampling(), seed=3, indices=[index], ends=ends)
        assert together[index].tokens == alone.tokens
        assert together[index].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({len(text.tokens) for text in together}) > 1


# ---------------------------------------------------------------------------------------------------------------
# Weights


def test_rows_of_merged_experts_are_read_from_separate_tensors(folders: Any) -> None:
    config = config_of(folders("qwen3_moe"))
    source = find_recipe("hf").initial_weights(config)
    assert source is not None
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = load_with_transformers(folders("qwen3_moe"))[0].state_dict()[name]
    asked: list[str] = []
    files = source._converted._source  # type: ignore[attr-defined]
    read = files.read
    files.read = lambda name, *rows: asked.append(name) or read(name, *rows)
    assert torch.equal(source.read(name, 1, 3), whole[1:3])
    assert {text.split("experts.")[1] for text in asked} == {
        f"{n}.{p}_proj.weight" for n in (1, 2) for p in ("gate", "up")
    }


def fresh_weights(folder: Path, kind: str, out: Path) -> dict[str, torch.Tensor]:
    trainer = Trainer(load_config("llama_small", overrides(folder, f"run.dir={out}", "model.fresh=true")))
    whole = {name: full(p) for name, p in trainer.model.named_parameters()}
    trainer.close()
    return whole


def test_added_modules_initialize_themselves(folders: Any) -> None:
    """Such as those of an adapter."""

    class Added(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            torch.nn.init.constant_(self.weight, 5.0)

    recipe, config = find_recipe("hf"), config_of(folders("llama"))
    with torch.device("meta"):
        model = recipe.build_model(config)
        model.model.layers[0].added = Added()  # type: ignore[union-attr, index]
    materialize(model, 0, torch.device("cpu"), recipe.init)
    assert model.model.layers[0].added.weight.eq(5.0).all()  # type: ignore[union-attr, index]
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)  # type: ignore[union-attr, operator]


@pytest.mark.slow
def test_random_weights_equal_those_of_transformers_on_any_mesh(folders: Any, tmp_path: Path) -> None:
    """GPT-2's residual projections are drawn a second time, by the block that contains them."""
    folder = folders("gpt2", n_embd=96)
    one, *_ = on_ranks(1, fresh_weights, folder, "gpt2", tmp_path / "one")
    for found in on_ranks(2, fresh_weights, folder, "gpt2", tmp_path / "two"):
        assert all(torch.equal(weight, found[name]) for name, weight in one.items())
    assert one["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert one["transformer.h.1.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert one["transformer.h.1.ln_1.weight"].eq(1).all()


def test_folder_without_weights_gets_random_ones(folders: Any, tmp_path: Path) -> None:
    shutil.copy(folders("llama") / "config.json", tmp_path)
    assert config_of(tmp_path).fresh
    assert find_recipe("hf").initial_weights(config_of(tmp_path)) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert not config_of(tmp_path).fresh
    with pytest.raises(UserError, match=r"^model\.path=.* only pytorch_model\.bin: pickle files are not read"):
        load_config("llama_small", [*overrides(tmp_path), f"run.dir={tmp_path / 'run'}"])


# ---------------------------------------------------------------------------------------------------------------
# The configuration


def test_auto_uses_the_native_recipe_if_it_builds_the_model(folders: Any, tmp_path: Path) -> None:
    def settled(folder: Path, *more: str) -> Any:
        return load_config("llama_small", overrides(folder, *more, name="auto"))

    native = settled(folders("llama"))
    assert (native.model.name, native.model.dim, native.train.init_from) == ("llama", 48, str(folders("llama")))
    assert settled(folders("llama"), "model.fresh=true").train.init_from is None
    assert settled(folders("llama"), "model.attention=eager").model.name == "hf", "it has no such key"
    assert settled(folders("llama", attention_bias=True)).model.name == "hf", "it builds no such thing"
    assert settled(folders("mistral")).model.path == str(folders("mistral"))
    assert load_weights(folders("mistral")).config.model_type == "mistral"


@pytest.mark.slow
def test_run_does_not_need_its_model_folder_after_the_start(folders: Any, tmp_path: Path) -> None:
    """The model's configuration is stored in config.yaml, which works as a recipe without the folder."""
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    more = [f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    config = load_config("llama_small", overrides(source, *more, "checkpoint.every=1"))
    for steps in (1, 2):
        trainer = Trainer(config)
        assert trainer.fit() == 0
        trainer.close()
        shutil.rmtree(source, ignore_errors=True)
        config = load_config(str(tmp_path / "run"), [f"train.steps={steps + 1}"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    source.mkdir()
    shutil.copy(folders("qwen3") / "config.json", source)
    with pytest.raises(UserError, match=r"(?s)^model\.path=.*differs from model\.config: .*model_type"):
        load_config(str(tmp_path / "run"))


def test_tokenizer_of_the_folder_is_used(folders: Any, tmp_path: Path) -> None:
    source = shutil.copytree(folders("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    for name in ("hf", "auto"):
        config = load_config("llama_small", overrides(source, "data.tokenizer=model", name=name))
        assert config.data.tokenizer == str(source / "tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "hf"},
            r"model\.path=null: model\.name=hf needs the folder of .*\n  for example: model\.path=models/Qwen",
        ),
        ({"name": "auto"}, r"model\.path=null: model\.name=auto needs a Hugging Face model folder"),
        (
            {"path": "nowhere"},
            r"model\.path=\S*nowhere: config\.json: cannot be read \(No such file(.|\n)*Face Hub: OWNER/nowhere",
        ),
        ({"attention": "flashy"}, r"model\.attention=flashy: must be one of sdpa, eager, flex"),
        (
            {"attention": "flash_attention_2"},
            r"model\.attention=flash_attention_2: transformers cannot compute attention this way \(",
        ),
        ({"init_from": "model"}, r"train\.init_from=\S+: model\.name=hf takes its weights from model\.path\n"),
        ({"model_type": "lama"}, r"model\.path=\S+: transformers \S+ has no .* for model_type=lama; it has llama"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: quantized weights are not supported"),
        ({"seq_len": 129}, r"data\.seq_len=129: is longer than model\.max_seq_len=128"),
        (
            {"num_hidden_layers": 3},
            r"model\.name=hf: the weights in \S+ do not fit the model:\n  missing there: model\.lay",
        ),
    ],
)
def test_mistakes(
    changes: dict[str, Any], message: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    source = shutil.copytree(folders("llama"), tmp_path / "source")
    keys = {"attention": "model.attention", "seq_len": "data.seq_len", "init_from": "train.init_from"}
    asked = {keys[key]: source if value == "model" else value for key, value in changes.items() if key in keys}
    entries = {key: value for key, value in changes.items() if key not in (*keys, "name", "path")}
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | entries))
    arguments = overrides(source, *(f"{key}={value}" for key, value in asked.items()), name=changes.get("name", "hf"))
    if "name" in changes:
        arguments = [item for item in arguments if not item.startswith("model.path")]
    if "path" in changes:
        arguments = [item.replace(str(source), changes["path"]) for item in arguments]
    assert run.main(["recipe=llama_small", *arguments, f"run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert re.search(f"^error: {message}", said, re.MULTILINE), said
    assert not (tmp_path / "run").exists()


def test_without_the_library_it_is_one_message(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    config, recipe = config_of(folders("llama")), find_recipe("hf")
    assert recipe.check is not None
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r"needs the transformers library: pip install 'meshtrainer\[transformers\]'"):
        recipe.check(config)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(UserError, match=r"needs transformers 5 or later; 4\.57\.1 is installed"):
        recipe.check(config)


# ---------------------------------------------------------------------------------------------------------------
# The planner


def test_flops_count_the_experts_that_a_token_goes_to(folders: Any) -> None:
    recipe, config = find_recipe("hf"), config_of(folders("qwen3_moe"))
    assert recipe.flops is not None
    attention, expert, scores = 48 * 16 * (2 * 4 + 2 * 2), 3 * 48 * 32, 2 * (4 * 16) * 32 / 2
    assert recipe.flops(config, 32) == 6 * (2 * (attention + 2 * expert + 48 * 4 + scores) + 48 * 257)
    assert recipe.flops(config_of(folders("mamba")), 32) > 0, "it has no attention"
    windowed = config_of(folders("mistral"))
    assert recipe.flops(windowed, 64) - recipe.flops(windowed, 16) == 6 * 2 * 2 * 48 * ((16 - 16**2 / 128) - 8)
