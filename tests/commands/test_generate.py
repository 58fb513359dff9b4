"""Generated text: token for token that of a plain loop and of transformers' `generate`, printed as it is generated."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.commands import meshtrainer
from tests.helpers.launch import command
from tests.helpers.native_models import (
    MODELS,
    build,
    chat_folder,
    folder_of,
    load_with_transformers,
    tokenizer_json,
)
from tests.helpers.runs import SharedRun
from trainer import Sampling, UserError, generate_batch, load_weights
from trainer.data.tokenizer import ByteTokenizer
from trainer.generate import open_generator, stream_text
from trainer.sequence import Cache

GREEDY = Sampling(0.0)
PROMPT = [5, 99, 17, 3, 140]
PROMPTS = [[5], PROMPT, [17, 3, 200, 41, 6, 5, 5, 90, 31, 12], [88, 2], [9] * 17]
"""Of different lengths."""
ENDS = frozenset(range(0, 263, 7))


# ---------------------------------------------------------------------------------------------------------------
# Against the model itself


@torch.no_grad()
def continued(model: nn.Module, prompt: Sequence[int], num_tokens: int, context: int = 64) -> list[int]:
    """Return the most likely tokens, each from all that come before it or the last of them, without a cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(model(torch.tensor([tokens[-context:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


EVERYDAY = ("llama", "gpt2", "deepseek_v3", "qwen3_next", "gpt_oss")
"""One of each kind of cache, and learned positions."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.campaign) for name in MODELS]
)
def test_texts_of_a_batch_equal_those_without_a_cache(name: str) -> None:
    """Prompts of different lengths, whose texts end at different tokens, so that the batch becomes smaller."""
    model = build(*MODELS[name])
    limits = [16, 16, 3, 16, 12]
    together = generate_batch(model, PROMPTS, limits, ends=ENDS)
    for prompt, limit, text in zip(PROMPTS, limits, together, strict=True):
        with torch.no_grad():  # the token after each token, without a cache
            whole = model(torch.tensor([[*prompt, *text.tokens[:-1]]]))[0, len(prompt) - 1 :].log_softmax(-1)
        assert text.tokens == whole.argmax(-1).tolist()
        assert text.logprobs == pytest.approx(whole.amax(-1).tolist(), abs=1e-5)
        assert not ENDS & {*text.tokens[:-1]}
        assert text.finish == ("end" if text.tokens[-1] in ENDS else "length")
        assert text.finish == "end" or len(text.tokens) == limit
    assert len({len(text.tokens) for text in together}) > 2


SAMPLINGS = {"plain": Sampling(), "top_k": Sampling(1.0, top_k=20), "top_p": Sampling(1.0, top_p=0.7)}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if name == "llama" else pytest.mark.campaign)
        for name in MODELS
        for how in SAMPLINGS
    ],
)
def test_sampled_texts_of_a_batch_equal_those_generated_alone(name: str, how: str) -> None:
    model, sampling = build(*MODELS[name]), SAMPLINGS[how]
    together = generate_batch(model, PROMPTS, 8, sampling, seed=3)
    for index, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
        (alone,) = generate_batch(model, [prompt], 8, sampling, seed=3, indices=[index])
        assert text.tokens == alone.tokens
    (rest,) = generate_batch(model, [[*PROMPT, *together[1].tokens[:5]]], 3, sampling, seed=3, indices=[1])
    assert rest.tokens == together[1].tokens[5:], "a text that was cut off is continued alike"
    assert generate_batch(model, PROMPTS, 8, sampling, seed=4)[0].tokens != together[0].tokens


def test_longer_texts_see_the_last_tokens() -> None:
    model = build(*MODELS["llama"])
    assert generate_batch(model, [PROMPT], 20, context=8)[0].tokens == continued(model, PROMPT, 20, context=8)


def test_texts_up_to_the_last_position_of_the_model() -> None:
    """One text has ended there, while another still has far to go."""
    model, prompts, limits = build(*MODELS["gpt2"]), [[9] * 60, [5, 3]], [4, 30]
    for prompt, limit, text in zip(prompts, limits, generate_batch(model, prompts, limits), strict=True):
        assert text.tokens == continued(model, prompt, limit)


def test_model_is_left_in_its_mode_and_an_empty_batch_is_empty() -> None:
    model = build(*MODELS["gpt2"]).train()
    assert generate_batch(model, [], 5) == []
    nothing, two = generate_batch(model, [[1], [2, 3]], [0, 2])
    assert (nothing.tokens, len(two.tokens)) == ([], 2)
    assert model.training


def test_non_finite_logits_end_only_their_text() -> None:
    model = build(*MODELS["llama"])
    with torch.no_grad():
        model.get_parameter("tok_embeddings.weight")[9] = torch.nan
    for sampling in (GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)):
        bad, good = generate_batch(model, [[9, 1], [5, 3]], 3, sampling, ends=[9])
        assert (bad.finish, bad.tokens) == ("not finite", [])
        assert good.finish in ("length", "end")


def test_cost_of_a_batch() -> None:
    """One call per token for all texts, which drops those that have ended, and computes only the last logits."""
    model, sizes = build(*MODELS["llama"]), list[int]()
    shapes = list[int]()
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    model.head.output.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
    generate_batch(model, PROMPTS[:4], [3, 5, 12, 12])
    assert sizes == [4] * 5 + [2] * 7
    assert shapes == [1] * 12


def test_cache_copies_nothing_but_to_grow() -> None:
    """The memory for keys doubles until it has `max_tokens`; other calls write into it."""
    cache, places, capacities = Cache(max_tokens=200), set[int](), set[int]()
    for _ in range(200):
        keys, _ = cache.extend(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        cache.advance(1)
        places.add(keys.data_ptr())
        capacities.add(keys.untyped_storage().nbytes() // keys[:, :, :1].nbytes)
    assert (max(capacities), cache.num_tokens) == (200, 200)
    assert len(places) <= 3


# ---------------------------------------------------------------------------------------------------------------
# Sampling


class Constant(nn.Module):
    """A model with the same distribution everywhere."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def drawn(logits: torch.Tensor, sampling: Sampling, number: int) -> torch.Tensor:
    """Return how often each token is drawn."""
    texts = generate_batch(Constant(logits), [[0]] * number, 1, sampling, context=8)
    return torch.bincount(torch.tensor([text.tokens[0] for text in texts]), minlength=len(logits))


def test_tokens_are_drawn_with_the_models_probabilities() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for temperature in (1.0, 0.5):
        expected = (probs.log() / temperature).softmax(0)
        shares = drawn(probs.log(), Sampling(temperature), 4000) / 4000
        error = (expected * (1 - expected) / 4000).sqrt()
        assert ((shares - expected).abs() < 5 * error).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_k=10), Sampling(3.0, top_p=0.9), Sampling(1.0, 8, 0.5)])
def test_drawn_tokens_are_those_that_sorting_the_vocabulary_leaves(sampling: Sampling) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    kept = {int(logits.argmax())}
    if sampling.temperature:
        probs, order = (logits / sampling.temperature).softmax(0).sort(descending=True)
        before = probs.cumsum(0) - probs
        kept = set(order[: sampling.top_k or 100][before[: sampling.top_k or 100] < sampling.top_p].tolist())
    assert set(drawn(logits, sampling, 3000).nonzero().flatten().tolist()) == kept


def test_text_is_printed_in_whole_characters() -> None:
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
        writer = open_generator(str(path), torch.device("cpu"), stack)
        (text,) = generate_batch(writer.model, [PROMPT], num_tokens, ends=writer.end_ids(ByteTokenizer()))
        return text.tokens


def written_there(folder: Path, num_tokens: int) -> list[int]:
    model = load_with_transformers(folder, dtype=torch.float32)
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    options = {"attention_mask": mask, "max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


@pytest.mark.slow
def test_greedy_text_of_a_run_equals_that_of_transformers_from_its_export(one: SharedRun, tmp_path: Path) -> None:
    command("trainer.export", one.folder, tmp_path / "out")
    expected = written_there(tmp_path / "out", 20)
    assert len(set(expected)) > 2
    assert written_here(one.folder, 20) == written_here(tmp_path / "out", 20) == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_moe" else pytest.mark.campaign) for name in MODELS]
)
def test_greedy_text_of_a_folder_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    recipe, config = MODELS[name]
    folder_of(tmp_path, recipe, config)
    assert written_here(tmp_path, 20) == written_there(tmp_path, 20)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["mistral", "olmo2", "phi3", "smollm3", "gemma3_text"])
def test_folder_without_recipe_is_generated_by_transformers(kind: str, tmp_path: Path) -> None:
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
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    chat_folder(path, *MODELS["qwen3"])
    tokenizer = json.loads(tokenizer_json(*WORDS)) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} <|im_end|> {% endfor %}w2")
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder, which no test changes."""
    return speaking(tmp_path_factory.mktemp("speaking") / "model", eos_token_id=[262])


def written(*arguments: object) -> str:
    ended = meshtrainer("generate", *arguments)
    assert ended.code == 0, ended.err
    return ended.out


def refused(*arguments: object) -> str:
    """Return the message, with exit code 2."""
    ended = meshtrainer("generate", *arguments)
    assert ended.code == 2, ended.out
    return ended.err


def test_prompt_is_continued_and_a_seed_repeats_the_text(tmp_path: Path) -> None:
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    model = load_weights(folder)
    expected = [token for token in continued(model, [3, 5], 12) if token < len(WORDS)]
    found = written(folder, "--prompt", "w3 w5", "--greedy", "--max-tokens", 12)
    assert found.split() == [WORDS[token] for token in expected]
    own = [folder, "--prompt", "w3 w5", "--max-tokens", 20, "--temperature", 3, "--seed"]
    assert written(*own, 1) == written(*own, 1) != written(*own, 2)


def test_chat_uses_the_template_and_ends_at_the_models_end_token(tmp_path: Path) -> None:
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    end = len(WORDS)
    tokens = continued(load_weights(folder), [1, 7, end, 2], 30)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [262, tokens[6]]}))
    found = written(folder, "--chat", "w7", "--greedy", "--max-tokens", 30)
    until = tokens.index(tokens[6])
    assert found.split() == [WORDS[token] for token in tokens[:until] if token < len(WORDS)]


def test_file_of_prompts_is_answered_in_order(folder: Path, tmp_path: Path) -> None:
    """The same answers for any batch size."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    records: list[dict[str, Any]] = [{"prompt": "w1 " * n, "id": n} for n in (3, 1, 5)]
    records += [{"messages": [{"role": "user", "content": f"w{n}"}]} for n in (4, 6)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    own = [folder, "--prompts", prompts, "--max-tokens", 9]
    printed = [json.loads(line) for line in written(*own, "--batch", 1).splitlines()]
    assert [{**answer, **record} for answer, record in zip(printed, records, strict=True)] == printed
    assert len({answer["completion"] for answer in printed}) > 3
    assert written(*own, "--batch", 3, "--out", out) == ""
    lines = out.read_text().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == printed
    plain = tmp_path / "prompts.txt"
    plain.write_text("w1 w1 w1 \n\nw1 \n")
    answers = [json.loads(line) for line in written(folder, "--prompts", plain, "--max-tokens", 9).splitlines()]
    assert [answer["completion"] for answer in answers] == [answer["completion"] for answer in printed[:2]]


def test_without_enough_memory_the_message_names_the_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    (tmp_path / "prompts.txt").write_text("w1\nw2\n")
    monkeypatch.setattr("trainer.generate.generate_batch", fail)
    ended = meshtrainer("generate", folder, "--prompts", tmp_path / "prompts.txt", "--batch", 16)
    assert (ended.code, ended.out) == (1, "")
    assert "--batch below 16" in ended.err
    assert "Traceback" not in ended.err


def test_an_existing_file_is_not_touched(folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text('{"prompt": "w1"}\n')
    out.write_text("notes of another kind")
    for path in (out, tmp_path, tmp_path / "none" / "out.jsonl"):
        assert refused(folder, "--prompts", prompts, "--out", path).startswith(f"error: --out={path}: ")
    assert out.read_text() == "notes of another kind"
    prompts.write_text('{"prompt": "w1", "completion": "of another model"}\n')
    assert "completion" in refused(folder, "--prompts", prompts)
    elsewhere = refused(folder, "--prompts", "http://me:secret-word@host/p.txt")
    assert "not on a local file system" in elsewhere
    assert "secret-word" not in elsewhere


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.txt", b"\xef\xbb\xbfw1\nw2 w3\n"),
        ("array.json", b'[{"prompt": "w1"},\n {"prompt": "w2 w3"}]'),
        ("table.csv", b"prompt\nw1\nw2 w3\n"),
        ("lines.jsonl.gz", gzip.compress(b'{"prompt": "w1"}\n{"prompt": "w2 w3"}\n', mtime=0)),
    ],
    ids=["bom.txt", "array.json", "table.csv", "lines.jsonl.gz"],
)
def test_files_of_prompts(name: str, content: bytes, folder: Path, tmp_path: Path) -> None:
    """In the forms that chats have too, with the byte order mark that editors write."""
    (tmp_path / name).write_bytes(content)
    lines = written(folder, "--prompts", tmp_path / name, "--max-tokens", 2).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["w1", "w2 w3"]


def test_sampling_parameters_of_the_model(tmp_path: Path) -> None:
    folder = speaking(tmp_path / "folder")
    for settings in ({"top_k": "50"}, {"temperature": -1.0}, {"top_p": 2}, {"top_k": -2}):
        (folder / "generation_config.json").write_text(json.dumps(settings))
        said = refused(folder, "--prompt", "w1")
        assert "generation_config.json" in said
        assert next(iter(settings)) in said
    (folder / "generation_config.json").write_text('{"temperature": -1.0}')
    written(folder, "--prompt", "w1", "--temperature", 1, "--max-tokens", 2)
    with pytest.raises(UserError, match=r"^temperature=-1\.0: "):
        Sampling(-1.0)


def test_logits_that_overflow_end_the_command_with_1(tmp_path: Path) -> None:
    folder = speaking(tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].sign() * 3e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ended = meshtrainer("generate", folder, "--prompt", "w1")
    assert ended.code == 1
    assert "Traceback" not in ended.err


def test_prompt_that_is_not_text(folder: Path) -> None:
    """Bytes that are not UTF-8 reach a Python program as lone surrogates."""
    assert "must be text in UTF-8" in refused(folder, "--prompt", "\udcff")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "w1", "--max-tokens", "0"],
        ["--prompt", "w1", "--batch", "4"],
        ["--prompt", "w1", "--temperature", "inf"],
        ["--prompts", "none.txt"],
        ["--prompt", "w1", "--top-p", "0"],
        ["--prompt", "w1", "--greedy", "--temperature", "1"],
    ],
    ids=" ".join,
)
def test_mistake_is_one_message(arguments: list[str], folder: Path) -> None:
    said = refused(folder, *arguments)
    assert said.startswith(f"error: {arguments[-2]}={arguments[-1]}")
    assert said.count("error:") == 1


def test_prompt_and_model_must_go_together(tmp_path: Path) -> None:
    """A tokenizer without a template cannot chat, and a prompt may fill the positions of the model."""
    folder_of(tmp_path, *MODELS["gpt2"])
    for option, text in (("--chat", "a"), ("--prompt", "a" * 64)):
        assert refused(tmp_path, option, text).startswith(f"error: {option}={text[:60]}")


def test_prompt_with_bytes_that_the_model_does_not_know(tmp_path: Path) -> None:
    """As with a model of synthetic tokens: it has no tokenizer, and may have fewer tokens than there are bytes."""
    spec, config = MODELS["llama"]
    model, prompts = folder_of(tmp_path / "model", spec, replace(config, vocab_size=100)), tmp_path / "prompts.txt"
    prompts.write_text("ABC\nabe\n")
    for option, text, place in (("--prompt", "abe", ""), ("--prompts", str(prompts), "prompts.txt:2: ")):
        assert refused(model, option, text).startswith(f"error: {option}={text}: {place}has token 101 ")
