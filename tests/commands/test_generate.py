"""What a model writes: token for token what transformers' `generate` writes, as text and as it comes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_native_models import KINDS, write_theirs
from tests.weights.test_huggingface import MODELS, build, load_there
from tests.weights.test_pretrained import chat_folder, config_of, tokenizer_json
from trainer import Trainer, generate, load_weights
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import TrainingFailed
from trainer.export import command_line as export
from trainer.generate import open_generator, stream_text
from trainer.model.sample import GREEDY, CachedDecoder, Sampling, WindowDecoder, generate_sample, generate_tokens
from trainer.sequence import Cache

CPU = torch.device("cpu")
PROMPT = [5, 99, 17, 3, 140]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_cached_is_what_would_be_computed_anew(name: str) -> None:
    """However many tokens are read at once."""
    model = build(*MODELS[name])
    tokens = torch.randint(0, 263, (1, 12), generator=torch.Generator().manual_seed(1))
    cache, start, found = Cache(), 0, []
    with torch.no_grad():
        for stop in (5, 6, 7, 11, 12):
            found.append(model(tokens[:, start:stop], documents=cache))
            cache.advance(stop - start)
            start = stop
        whole = model(tokens)
    assert (torch.cat(found, 1) - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_window_says_the_same_and_moves_on(name: str) -> None:
    model = build(*MODELS[name])
    draws = [
        list(generate_tokens(reader, PROMPT, 20, Sampling(), torch.Generator().manual_seed(3)))
        for reader in (CachedDecoder(model, CPU), WindowDecoder(model, CPU, 32))
    ]
    assert draws[0] == draws[1]
    moved = list(generate_tokens(WindowDecoder(model, CPU, 8), PROMPT, 20, GREEDY, torch.Generator()))
    last = WindowDecoder(model, CPU, 8)
    assert moved[-1] == int(last([*PROMPT, *moved[:-1]][-8:]).argmax())


class Alone:
    device = CPU

    def broadcast(self, value: int) -> int:
        return value


def test_a_sample_in_training_comes_from_the_same_code() -> None:
    model, world = build(*MODELS["qwen3"]), Alone()
    cached = generate_sample(model, world, PROMPT, 10, context=32)
    assert cached == generate_sample(model, world, PROMPT, 10, context=32, is_compiled=True)
    assert (cached[:5], len(cached)) == (PROMPT, 15)
    assert len(generate_sample(model, world, PROMPT, 10, context=8)) == 15


def test_how_tokens_are_chosen() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def drawn(sampling: Sampling) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {sampling.choose(logits, generator) for _ in range(300)}

    assert drawn(GREEDY) == {0}
    assert drawn(Sampling(1.0)) == {0, 1, 2, 3}
    assert drawn(Sampling(1.0, top_p=0.8)) == {0, 1}
    assert drawn(Sampling(1.0, top_p=0.81)) == {0, 1, 2}
    assert drawn(Sampling(1.0, top_p=0.01)) == {0}
    assert drawn(Sampling(1.0, top_k=3)) == {0, 1, 2}
    assert drawn(Sampling(0.01)) == {0}


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, Sampling(top_k=2), Sampling(top_p=0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_a_text(sampling: Sampling, value: float) -> None:
    """In a step of which the loss is not finite either: that one is skipped, and the run goes on."""
    logits = torch.tensor([0.0, 1.0, value, -math.inf])
    generator = torch.Generator()
    assert list(generate_tokens(lambda _: logits, [0], 5, sampling, generator)) == []
    with pytest.raises(TrainingFailed, match="logits are not finite"):
        list(generate_tokens(lambda _: logits, [0], 5, sampling, generator, agree=generate._require_token))


def test_text_comes_in_whole_characters() -> None:
    text = "né — 日本"
    tokens = list(text.encode())
    found = list(stream_text(tokens, list(b"abc"), ByteTokenizer().decode))
    assert "".join(found) == text
    assert len(found) == len(text)
    assert list(stream_text(tokens[:2], [], ByteTokenizer().decode)) == ["n", "\N{REPLACEMENT CHARACTER}"]


# ---------------------------------------------------------------------------------------------------------------
# Against transformers


def written_here(path: Path, num_tokens: int) -> list[int]:
    with ExitStack() as stack:
        writer = open_generator(str(path), CPU, stack)
        return list(
            generate_tokens(
                writer.build_decoder(), PROMPT, num_tokens, GREEDY, torch.Generator(), writer.end_ids(ByteTokenizer())
            )
        )


def written_there(folder: Path, num_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    model = load_there(folder, dtype=torch.float32)
    given = torch.tensor([list(prompt)])
    mask = torch.ones_like(given)
    made = model.generate(given, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "qwen3_moe" else pytest.mark.campaign) for kind in KINDS]
)
def test_greedy_is_what_transformers_generates_from_the_export(kind: str, tmp_path: Path) -> None:
    source = write_theirs(kind, tmp_path / "source")
    own = [f"model.name={kind}", f"run.dir={tmp_path / 'run'}", "optim.lr=1e-2"]
    trainer = Trainer(config_of(source, *own))
    assert trainer.fit() == 0
    trainer.close()
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    expected = written_there(tmp_path / "out", 40)
    assert len(set(expected)) > 3
    assert written_here(tmp_path / "run", 40) == written_here(tmp_path / "out", 40) == expected


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["mistral", "olmo2", "phi3", "smollm3", "gemma3_text"])
def test_what_no_recipe_builds_transformers_does(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 263, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert written_here(tmp_path, 20) == written_there(tmp_path, 20)


# ---------------------------------------------------------------------------------------------------------------
# Command line


WORDS = [f"w{number}" for number in range(40)]


def speaking(path: Path, **settings: Any) -> Path:
    """Write a folder whose tokenizer knows 40 words, and has a chat template."""
    recipe, config = MODELS["qwen3"]
    chat_folder(path, recipe, config)
    (path / "tokenizer.json").write_bytes(with_spaces(tokenizer_json(*WORDS)))
    (path / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} <|im_end|> {% endfor %}w2")
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def with_spaces(tokenizer: bytes) -> bytes:
    return json.dumps(json.loads(tokenizer) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}).encode()


def said(capsys: pytest.CaptureFixture[str], *arguments: object, ends: int = 0) -> str:
    capsys.readouterr()
    assert generate.command_line([str(argument) for argument in arguments]) == ends
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_prompt_is_gone_on_from_and_a_seed_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    reader = CachedDecoder(load_weights(folder), CPU)
    expected = [token for token in generate_tokens(reader, [3, 5], 12, GREEDY, torch.Generator()) if token < len(WORDS)]
    found = said(capsys, folder, "--prompt", "w3 w5", "--greedy", "--max-tokens", 12)
    assert found.split() == [WORDS[token] for token in expected]
    drawn = [said(capsys, folder, "--prompt", "w3 w5", "--seed", seed, "--temperature", 3) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_chat_is_written_by_the_template_and_ends_where_the_model_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    end = len(WORDS)
    prompt = [1, 7, end, 2]
    tokens = list(generate_tokens(CachedDecoder(load_weights(folder), CPU), prompt, 30, GREEDY, torch.Generator()))
    speaking(tmp_path / "ends", eos_token_id=[262, tokens[6]])
    found = said(capsys, tmp_path / "ends", "--chat", "w7", "--greedy", "--max-tokens", 30)
    until = tokens.index(tokens[6])
    assert found.split() == [WORDS[token] for token in tokens[:until] if token < len(WORDS)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens=0: must be at least 1"),
        (["--prompt", "a", "--top-p", "0"], "--top-p=0.0: must be above 0"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature=-1.0: must be at least 0"),
        (["--prompt", "a", "--greedy", "--temperature", "1"], "--temperature=1.0: cannot be combined with --greedy"),
        (["--chat", "a"], "--chat=a: data.tokenizer=bytes has no chat template"),
        (["--prompt", "a" * 64], f"={'a' * 60}...: is 64 tokens long, but the model has positions for 64"),
    ],
)
def test_mistakes_are_said(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.weights.test_huggingface import export_model

    recipe, config = MODELS["gpt2"]
    export_model(build(recipe, config), recipe, config, tmp_path)
    assert generate.command_line([str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_and_a_reader_that_has_gone_end_it_quietly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    folder = speaking(tmp_path / "folder", eos_token_id=[])

    def interrupted(*arguments: Any) -> Any:
        yield 3
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(generate, "generate_tokens", interrupted)
        assert said(capsys, folder, "--prompt", "w1", ends=130) == " w3\n"
    receiving, sending = os.pipe()
    os.close(receiving)
    with open(sending, "w") as nobody, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", nobody)
        assert generate.command_line([str(folder), "--prompt", "w1", "--greedy"]) == 0
    assert capsys.readouterr().err == ""
