"""Generated text: token for token that of transformers' `generate`, printed as it is generated."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.native_models import (
    KINDS,
    MODELS,
    build,
    chat_folder,
    config_of,
    export_model,
    load_with_transformers,
    tokenizer_json,
    write_theirs,
)
from trainer import Trainer, UserError, generate, load_weights
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import TrainingFailed
from trainer.export import command_line as export
from trainer.generate import open_generator, stream_text
from trainer.model.sample import (
    GREEDY,
    NO_TOKEN,
    CachedDecoder,
    Decoder,
    Sampling,
    WindowDecoder,
    generate_batch,
    generate_tokens,
    gumbel_noise,
)
from trainer.sequence import Cache

CPU = torch.device("cpu")
PROMPT = [5, 99, 17, 3, 140]


@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_equal_recomputed_ones(name: str) -> None:
    """For any number of tokens read at once."""
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


def tokens_of(decoder: Decoder, prompt: Sequence[int], num_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    return [generated.token for generated in generate_tokens(decoder, [prompt], [num_tokens], sampling, seed=3)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sliding_window_gives_the_same_text(name: str) -> None:
    model = build(*MODELS[name])
    cached, windowed = CachedDecoder(model, CPU), WindowDecoder(model, CPU, 32)
    assert tokens_of(cached, PROMPT, 20, Sampling()) == tokens_of(windowed, PROMPT, 20, Sampling())
    moved = tokens_of(WindowDecoder(model, CPU, 8), PROMPT, 20)
    with torch.no_grad():
        last = model(torch.tensor([[*PROMPT, *moved[:-1]][-8:]]))[0, -1]
    assert moved[-1] == int(last.argmax())
    assert generate_batch(model, [PROMPT], 20, context=8)[0].tokens == moved


PROMPTS = [[5], PROMPT, [17, 3, 200, 41, 6, 5, 5, 90, 31, 12], [88, 2], [9] * 17, [140, 3, 3]]
"""Of different lengths."""
ENDS = frozenset({7, 9, 50, 51, 52, 53, 54, 60, 61, 62, 63, 64, 65})


SAMPLINGS = {"greedy": GREEDY, "plain": Sampling(), "top_k": Sampling(1.0, top_k=20), "top_p": Sampling(1.0, top_p=0.7)}
EVERYDAY = {
    *(("llama", how) for how in SAMPLINGS),
    *(("deepseek_v3", "greedy"), ("qwen3_next", "greedy"), ("gpt_oss", "top_k"), ("gpt2", "top_k")),
}
"""Each way of sampling with one model; each kind of cache, and learned positions, with one way of sampling."""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in EVERYDAY else pytest.mark.campaign)
        for name in MODELS
        for how in SAMPLINGS
    ],
)
def test_texts_of_a_batch_equal_those_generated_alone(name: str, how: str) -> None:
    """Prompts of different lengths, whose texts end at different tokens, so that the batch becomes smaller."""
    model, sampling = build(*MODELS[name]), SAMPLINGS[how]
    limits = [40, 40, 3, 40, 40, 25]
    together = generate_batch(model, PROMPTS, limits, sampling, seed=3, ends=ENDS)
    for index, (prompt, limit, text) in enumerate(zip(PROMPTS, limits, together, strict=True)):
        (alone,) = generate_batch(model, [prompt], limit, sampling, seed=3, indices=[index], ends=ENDS)
        assert text.tokens == alone.tokens
        assert text.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert text.finish == ("end" if text.tokens[-1] in ENDS else "length")
        assert text.finish == "end" or len(text.tokens) == limit
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, *text.tokens]]))[0].log_softmax(-1)
        expected = [float(whole[len(prompt) + n - 1, token]) for n, token in enumerate(text.tokens)]
        assert text.logprobs == pytest.approx(expected, abs=1e-5)
    assert len({len(text.tokens) for text in together}) > 2


def test_noise_is_a_function_of_seed_prompt_and_position() -> None:
    def noise(seed: int, index: int, position: int) -> torch.Tensor:
        return gumbel_noise(seed, [0, index], [0, position], 500, CPU)[1]

    assert noise(0, 1, 2).equal(gumbel_noise(0, [1], [2], 500, CPU)[0])
    assert noise(0, 1, 2)[:100].equal(gumbel_noise(0, [1], [2], 100, CPU)[0])
    others = [noise(0, 1, 2), noise(1, 1, 2), noise(0, 2, 2), noise(0, 1, 3), noise(0, 2, 1)]
    assert torch.corrcoef(torch.stack(others)).sub(torch.eye(5)).abs().max() < 5 / 500**0.5
    rows = gumbel_noise(5, range(200), [0] * 200, 5000, CPU).double()
    assert rows.isfinite().all()
    # The distribution function of the standard Gumbel distribution, at 40 points; 5 standard errors.
    for point in torch.linspace(-1.5, 6.0, 40).tolist():
        share = math.exp(-math.exp(-point))
        assert (rows <= point).double().mean() == pytest.approx(share, abs=5 * (share * (1 - share) / 1e6) ** 0.5)


def test_batch_calls_the_model_once_for_all_texts() -> None:
    """And drops those that have ended once they are half of the batch."""
    model, sizes = build(*MODELS["llama"]), list[int]()
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    generate_batch(model, PROMPTS, [3, 5, 5, 5, 12, 12])
    assert sizes == [6] * 5 + [2] * 7


def test_cache_copies_nothing_but_to_grow() -> None:
    """The memory for keys doubles until it has `max_tokens`; other calls write into it."""
    cache, places, capacities = Cache(max_tokens=200), list[int](), list[int]()
    for _ in range(200):
        keys, _ = cache.extend(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        cache.advance(1)
        places.append(keys.data_ptr())
        capacities.append(keys.untyped_storage().nbytes() // (2 * 4 * 4))
    assert sorted(set(capacities)) == [64, 130, 200]
    assert len(set(places)) <= 3
    assert cache.num_tokens == 200


def test_only_the_last_logits_of_a_prompt_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "gpt2", "qwen3_moe"):
        model = build(*MODELS[name])
        shapes = list[torch.Size]()
        model.head.output.register_forward_hook(
            lambda module, inputs, output, shapes=shapes: shapes.append(output.shape)
        )
        generate_batch(model, PROMPTS, 2)
        assert [shape[1] for shape in shapes] == [1, 1]
        assert model(torch.tensor([PROMPT])).shape[1] == len(PROMPT), "other calls compute all"


def test_texts_up_to_the_last_position_of_the_model() -> None:
    """One text has ended there, while another still has far to go."""
    model, prompts, limits = build(*MODELS["gpt2"]), [[9] * 60, [5, 3], [7]], [4, 62, 63]
    together = generate_batch(model, prompts, limits, Sampling(), seed=2)
    for index, text in enumerate(together):
        (alone,) = generate_batch(model, [prompts[index]], limits[index], Sampling(), seed=2, indices=[index])
        assert text.tokens == alone.tokens
        assert len(text.tokens) == limits[index]


def test_continuation_of_a_text_that_was_cut_off_is_the_same() -> None:
    model = build(*MODELS["qwen3"])
    (whole,) = generate_batch(model, [PROMPT], 30, Sampling(), seed=1)
    (rest,) = generate_batch(model, [[*PROMPT, *whole.tokens[:10]]], 20, Sampling(), seed=1)
    assert whole.tokens[10:] == rest.tokens


def test_model_is_left_in_its_mode_and_an_empty_batch_is_empty() -> None:
    model = build(*MODELS["gpt2"]).train()
    assert generate_batch(model, [], 5) == []
    nothing, two = generate_batch(model, [[1], [2, 3]], [0, 2])
    assert (nothing.tokens, len(two.tokens)) == ([], 2)
    assert model.training


def test_sampling_of_tokens() -> None:
    logprobs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(300, 4)
    noise = gumbel_noise(0, range(300), [0] * 300, 4, CPU)

    def drawn(sampling: Sampling) -> set[int]:
        return {*sampling.choose(logprobs, noise).tolist()}

    assert drawn(GREEDY) == {0}
    shares = torch.bincount(Sampling(1.0).choose(logprobs, noise)) / 300
    assert (shares - logprobs[0].exp()).abs().max() < 5 * 0.5 / 300**0.5
    assert drawn(Sampling(1.0)) == {0, 1, 2, 3}
    assert drawn(Sampling(1.0, top_p=0.8)) == {0, 1}
    assert drawn(Sampling(1.0, top_p=0.81)) == {0, 1, 2}
    assert drawn(Sampling(1.0, top_p=0.01)) == {0}
    assert drawn(Sampling(1.0, top_k=3)) == {0, 1, 2}
    assert drawn(Sampling(0.01)) == {0}


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=50), Sampling(3.0, top_p=0.9), Sampling(1.0, 40, 0.5)])
def test_sampled_tokens_are_those_that_sorting_the_vocabulary_leaves(sampling: Sampling) -> None:
    """For distributions of which 1 to 5,000 tokens are kept."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 6)[:, None]
    logprobs, noise = logits.log_softmax(1), gumbel_noise(0, range(6), [0] * 6, 5000, CPU)
    scores = logprobs / sampling.temperature
    probs, order = scores.softmax(1).sort(dim=1, descending=True)
    is_dropped = probs.cumsum(1) - probs >= sampling.top_p
    is_dropped[:, 0] = False
    is_dropped[:, sampling.top_k or 5000 :] = True
    expected = scores.masked_fill(is_dropped.scatter(1, order, is_dropped), -math.inf)
    assert sampling.choose(logprobs, noise).equal((expected + noise).argmax(1))
    lowest = sampling._lowest_score(scores)
    assert (scores >= lowest).sum(1).tolist() == (~is_dropped).sum(1).tolist()


class Fixed(Decoder):
    """Returns the same logits for every text."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def begin(self, prompts: Sequence[Sequence[int]], length: int, max_tokens: int) -> torch.Tensor:
        return self.logits

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, Sampling(top_k=2), Sampling(top_p=0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_end_a_text(sampling: Sampling, value: float) -> None:
    """Also in a step with a non-finite loss, which is skipped: the run continues, and so do the other texts."""
    logits = torch.tensor([[0.0, 1.0, value, -math.inf], [0.0, 5.0, 5.0, -math.inf]])
    generated = list(generate_tokens(Fixed(logits), [[0], [0]], [5, 5], sampling))
    assert [token.token for token in generated if token.row == 0] == [NO_TOKEN]
    assert len([token for token in generated if token.row == 1 and token.token in (0, 1, 2)]) == 5
    with pytest.raises(TrainingFailed, match="logits are not finite"):
        list(map(generate._require_token, generated))


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
        writer = open_generator(str(path), CPU, stack)
        (text,) = generate_batch(writer.model, [PROMPT], num_tokens, ends=writer.end_ids(ByteTokenizer()))
        return text.tokens


def written_there(folder: Path, num_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    model = load_with_transformers(folder, dtype=torch.float32)
    given = torch.tensor([list(prompt)])
    mask = torch.ones_like(given)
    made = model.generate(given, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "qwen3_moe" else pytest.mark.campaign) for kind in KINDS]
)
def test_greedy_text_equals_that_of_transformers_from_the_export(kind: str, tmp_path: Path) -> None:
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
    recipe, config = MODELS["qwen3"]
    chat_folder(path, recipe, config)
    (path / "tokenizer.json").write_bytes(with_spaces(tokenizer_json(*WORDS)))
    (path / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} <|im_end|> {% endfor %}w2")
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def with_spaces(tokenizer: bytes) -> bytes:
    return json.dumps(json.loads(tokenizer) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}).encode()


def generated_text(capsys: pytest.CaptureFixture[str], *arguments: object, exit_code: int = 0) -> str:
    capsys.readouterr()
    assert generate.command_line([str(argument) for argument in arguments]) == exit_code
    return capsys.readouterr().out


@pytest.mark.slow
def test_prompt_is_continued_and_a_seed_repeats_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    tokens = generate_batch(load_weights(folder), [[3, 5]], 12)[0].tokens
    expected = [token for token in tokens if token < len(WORDS)]
    found = generated_text(capsys, folder, "--prompt", "w3 w5", "--greedy", "--max-tokens", 12)
    assert found.split() == [WORDS[token] for token in expected]
    drawn = [
        generated_text(capsys, folder, "--prompt", "w3 w5", "--seed", seed, "--temperature", 3) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_chat_uses_the_template_and_ends_at_the_models_end_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = speaking(tmp_path / "folder", eos_token_id=[])
    end = len(WORDS)
    prompt = [1, 7, end, 2]
    tokens = generate_batch(load_weights(folder), [prompt], 30)[0].tokens
    speaking(tmp_path / "ends", eos_token_id=[262, tokens[6]])
    found = generated_text(capsys, tmp_path / "ends", "--chat", "w7", "--greedy", "--max-tokens", 30)
    until = tokens.index(tokens[6])
    assert found.split() == [WORDS[token] for token in tokens[:until] if token < len(WORDS)]


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_of_prompts_is_answered_in_order_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same answers for any batch size, and after an interruption in the middle of a line."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder, prompts = speaking(tmp_path / "folder", eos_token_id=[262]), tmp_path / "prompts.jsonl"
    records: list[dict[str, Any]] = [{"prompt": "w1 " * n, "id": n} for n in (3, 1, 5)]
    records += [{"messages": [{"role": "user", "content": f"w{n}"}]} for n in (4, 6)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    own = [folder, "--prompts", prompts, "--max-tokens", 9]
    printed = [json.loads(line) for line in generated_text(capsys, *own, "--batch", 1).splitlines()]
    assert [{**answer, **record} for answer, record in zip(printed, records, strict=True)] == printed
    assert {answer["finish"] for answer in printed} <= {"end", "length"}
    assert len({answer["completion"] for answer in printed}) > 3
    out = tmp_path / "out.jsonl"
    assert generated_text(capsys, *own, "--batch", 3, "--out", out) == ""
    assert answers(out) == printed
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:20])
    generated_text(capsys, *own, "--batch", 2, "--out", out)
    assert out.read_text() == "".join(lines)
    assert generated_text(capsys, *own, "--out", out) == ""
    plain = tmp_path / "prompts.txt"
    plain.write_text("w1 w1 w1 \n\nw1 \n")
    lines = generated_text(capsys, folder, "--prompts", plain, "--max-tokens", 9).splitlines()
    assert [json.loads(line)["completion"] for line in lines] == [answer["completion"] for answer in printed[:2]]
    assert generate.command_line([str(folder), "--prompts", str(plain), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count(f"error: --out={out}: ") == 1


def test_answers_of_another_model_or_of_other_settings_are_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    folder, prompts, out = speaking(tmp_path / "folder"), tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("w1\nw2\n")
    own = ["--prompts", prompts, "--out", out, "--max-tokens", 3]
    generated_text(capsys, folder, *own, "--temperature", 0.5)
    line, _ = written = out.read_text().splitlines(keepends=True)
    moved = tmp_path / "moved"
    folder.rename(moved)
    out.write_text(line + "{")
    generated_text(capsys, moved, *own, "--temperature", 0.5, "--batch", 1)
    assert out.read_text() == "".join(written), "the same weights in another place continue it"
    other = speaking(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for arguments in (
        [other, *own, "--temperature", 0.5],
        [moved, *own, "--temperature", 0.7],
        [moved, *own, "--seed", 3],
        [moved, *own[:-1], 4, "--greedy"],
    ):
        for content in (line, "".join(written)):  # unfinished and finished
            out.write_text(content)
            assert generate.command_line([*map(str, arguments)]) == 2
            assert capsys.readouterr().err.count(f"error: --out={out}: ") == 1
            assert out.read_text() == content
    (tmp_path / "out.jsonl.provenance.json").unlink()
    assert generate.command_line([*map(str, (moved, *own))]) == 2
    assert "out.jsonl.provenance.json" in capsys.readouterr().err


def test_files_that_are_no_answers_are_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    folder, prompts = speaking(tmp_path / "folder"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1"}\n{"prompt": "w2"}\n')
    for text in ("notes of another kind, one line", '{"prompt": "w1"}\n', prompts.read_text(), '{"prompt": "w3", "c'):
        out = tmp_path / "notes.txt"
        out.write_text(text)
        assert generate.command_line([str(folder), "--prompts", str(prompts), "--out", str(out)]) == 2
        assert capsys.readouterr().err.count(f"error: --out={out}: ") == 1
        assert out.read_text() == text
    assert generate.command_line([str(folder), "--prompts", str(prompts), "--out", str(tmp_path)]) == 2
    assert f"--out={tmp_path}: " in capsys.readouterr().err
    prompts.write_text('{"prompt": "w1", "completion": "of another model"}\n')
    assert generate.command_line([str(folder), "--prompts", str(prompts)]) == 2
    assert "completion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.txt", b"\xef\xbb\xbfw1\nw2 w3\n"),
        ("array.json", b'[{"prompt": "w1"},\n {"prompt": "w2 w3"}]'),
        ("table.csv", b"prompt\nw1\nw2 w3\n"),
        ("lines.jsonl.gz", gzip.compress(b'{"prompt": "w1"}\n{"prompt": "w2 w3"}\n')),
    ],
    ids=["byte order mark", "array", "table", "compressed"],
)
def test_files_of_prompts(name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the forms that chats have too, with the byte order mark that editors write."""
    pytest.importorskip("tokenizers")
    (tmp_path / name).write_bytes(content)
    lines = generated_text(
        capsys, speaking(tmp_path / "folder"), "--prompts", tmp_path / name, "--max-tokens", 2
    ).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["w1", "w2 w3"]


def test_sampling_parameters_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    for number, settings in enumerate([{"top_k": "50"}, {"temperature": -1.0}, {"top_p": 2}, {"top_k": -2}]):
        folder = speaking(tmp_path / str(number), **settings)
        assert generate.command_line([str(folder), "--prompt", "w1"]) == 2
        (key,) = settings
        shown = capsys.readouterr().err
        assert "generation_config.json: " in shown
        assert key in shown
    generated_text(capsys, tmp_path / "1", "--prompt", "w1", "--temperature", 1, "--max-tokens", 2)
    generated_text(capsys, speaking(tmp_path / "all", top_k=-1), "--prompt", "w1", "--max-tokens", 2)
    with pytest.raises(UserError, match=r"^temperature=-1\.0: "):
        Sampling(-1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "a", "--max-tokens", "0"],
        ["--prompt", "a", "--batch", "4"],
        ["--prompt", "a", "--temperature", "inf"],
        ["--prompts", "none.txt"],
        ["--prompt", "a", "--top-p", "0"],
        ["--prompt", "a", "--greedy", "--temperature", "1"],
        ["--chat", "a"],
    ],
    ids=" ".join,
)
def test_mistake_is_one_message(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, config = MODELS["gpt2"]
    export_model(build(recipe, config), recipe, config, tmp_path)
    assert generate.command_line([str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {arguments[-2]}={arguments[-1]}")
