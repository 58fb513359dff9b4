"""GGUF files: converted once, to the model that transformers reads from the same file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.forked import REPOSITORY
from tests.helpers.hf_models import model_of
from tests.weights.test_real_model import gguf_file
from trainer import gguf_model, load_config, load_weights
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import UserError

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

__all__ = ["gguf_file"]

TOKENS = ["<|end|>", *(chr(c) for c in range(33, 127)), "Ġ", "he", "Ġt"]
NAMES = {"llama": "llama", "qwen3": "qwen3"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Vocabulary:
    """The metadata of a tokenizer, without the prefix `tokenizer.ggml.`."""

    tokens: list[str]
    types: list[int]
    entries: dict[str, Any]


def of_bytes(pre: str = "gpt-2") -> Vocabulary:
    entries = {"model": "gpt2", "pre": pre, "merges": ["h e", "Ġ t"], "eos_token_id": 0}
    return Vocabulary(TOKENS, [3, *[1] * (len(TOKENS) - 1)], entries)


def of_sentencepiece(num_tokens: int = 600, **entries: Any) -> Vocabulary:
    """Return a vocabulary that was learned from a page of this project, as SentencePiece writes one."""
    import tokenizers

    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=num_tokens - 262, show_progress=False)
    learned.train_from_iterator([(REPOSITORY / "docs" / "architecture.md").read_text()], trainer)
    ids = learned.get_vocab()
    merged = sorted((token for token in ids if len(token) > 1), key=lambda token: ids[token])
    merged += [token for token in ("s>", "▁▁") if token not in ids]
    characters = sorted(token for token in ids if len(token) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", "<|end|>"]
    types = [2, 3, 3, *[6] * 256, 4, 3, *[1] * (len(merged) + len(characters))]
    tokens += [*merged, *characters]
    scores = [*[0.0] * 261, *(float(-rank) for rank in range(len(tokens) - 261))]
    known = {"model": "llama", "scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Vocabulary(tokens, types, known | entries)


def write(
    path: Path, kind: str = "llama", vocabulary: Vocabulary | None = None, quantized: bool = True, **metadata: Any
) -> Any:
    """Write transformers' tiny model as llama.cpp would, and return the model with the values that are stored."""
    vocabulary = vocabulary or of_bytes()
    model = model_of(kind, hidden_size=64, intermediate_size=128, vocab_size=len(vocabulary.tokens), head_dim=16)
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    for name, value in vocabulary.entries.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_chat_template("{{ messages }}")
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    hf_names = {**gguf_model._TENSOR_NAMES, **gguf_model._LAYER_TENSOR_NAMES}
    gguf_names = {hf_name: gguf_name for gguf_name, hf_name in hf_names.items()}
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        layer = stem.removeprefix("model.layers.").partition(".")
        gguf_name = gguf_names[stem] if stem in gguf_names else f"blk.{layer[0]}.{gguf_names[layer[2]]}"
        values = tensor.numpy().copy()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = values.shape[0] // 16
            values = values.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(values.shape)  # llama.cpp's pairs
        if quantized and values.ndim > 1:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            kept = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
                kept = kept.reshape(heads, 8, 2, -1).swapaxes(1, 2).reshape(values.shape)
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(kept)))
            writer.add_tensor(f"{gguf_name}.{suffix}", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{gguf_name}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_are_those_of_the_stored_values(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "m.gguf", kind)
    ids = torch.arange(40)[None] % len(TOKENS)
    ours = load_weights(tmp_path / "m.gguf")
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert "m.gguf: dequantizing Q8_0 weights to " in capsys.readouterr().err
    load_weights(tmp_path)  # a folder with nothing else
    assert "dequantiz" not in capsys.readouterr().err, "a file is converted once"


@pytest.mark.parametrize("name", ["m.gguf", "m-0.6B-Q8_0.gguf"])
def test_a_configuration_names_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    config = load_config("llama_small", ["model.name=auto", f"model.path={name}"])
    assert (config.model.name, config.model.dim, config.model.vocab_size) == ("llama", 64, len(TOKENS))
    text = config.to_yaml()
    assert f"init_from: {tmp_path / name}\n" in text
    assert f"tokenizer: {tmp_path / name}\n" in text
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config("mine.yaml").to_yaml() == text
    from_it = load_config("llama_small", [f"train.init_from={tmp_path / name}"])
    assert from_it.model.dim == 64


def test_text_is_split_as_the_file_says(tmp_path: Path) -> None:
    import tokenizers

    write(tmp_path / "m.gguf", vocabulary=of_bytes("smollm"))
    folder = gguf_model.convert(tmp_path / "m.gguf", "model.path", with_weights=False)
    assert not (folder / "model.safetensors").exists()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("the t12<|end|>").tokens == ["t", "he", "Ġt", "1", "2", "<|end|>"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


TEXTS = [
    *(
        "the run waits for rank 0",
        "  two  spaces   three ",
        "\n\nline\n tab\t",
        "a",
        " ",
        "",
        "trainer.trainer(x):\n\n",
    ),
    *(
        "naïve café 中文字符 \U0001f600\U0001f469\u200d\U0001f467",
        "<s> the </s><think>x<|end|> <unk><0x41>",
        "▁the ▁▁▁",
    ),
]


def test_sentencepiece_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    """Of the same file; characters that are not in the vocabulary become bytes."""
    import tokenizers
    from transformers import AutoTokenizer

    write(tmp_path / "m.gguf", vocabulary=of_sentencepiece())
    folder = gguf_model.convert(tmp_path / "m.gguf", "model.path", with_weights=False)
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    page = (REPOSITORY / "docs" / "data.md").read_text()
    for text in [*TEXTS, *(page[start : start + 97] for start in range(0, 9700, 97))]:
        ids = theirs(text).input_ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("the").ids[0] == 1, "a text begins with <s> unless the file says otherwise"
    found = find_tokenizer(str(folder))
    assert (found.start_ids, found.end_ids) == ((1,), (2,))
    assert 1 not in found.encode("<s> </s> <0x41>"), "text never becomes a control token, or that of a byte"
    assert found.decode(found.encode(page)) == page


def test_sentencepiece_as_the_file_says(tmp_path: Path) -> None:
    """No space in front, and which special tokens are around a text: as llama.cpp reads them."""
    import tokenizers

    entries = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    write(tmp_path / "m.gguf", vocabulary=of_sentencepiece(**entries))
    folder = gguf_model.convert(tmp_path / "m.gguf", "model.path", with_weights=False)
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    *pieces, last = ours.encode("the run").tokens
    assert ("".join(pieces), last) == ("the▁run", "</s>")
    assert ours.decode(ours.encode(" the").ids) == " the"


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "odd": lambda: of_bytes("odd"),
    "bert": lambda: of_sentencepiece(model="bert"),
    "unscored": lambda: of_sentencepiece(scores=[]),
    "short": lambda: of_sentencepiece(scores=[0.0] * 599),
}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"path=\S+m\.gguf: m\.gguf: is not a complete GGUF file"),
        ("mamba", r"has the architecture 'mamba'; supported: llama, qwen2, qwen3"),
        ("odd", r"its tokenizer \(gpt2 with the rules of 'odd'\) is not supported"),
        ("yarn", r"its RoPE scaling 'yarn' is not supported"),
        ("bert", r"its tokenizer \(bert\) is not supported; supported: llama \(SentencePiece\), and gpt2 with "),
        ("unscored", r"its metadata has no tokenizer\.ggml\.scores"),
        ("short", r"its tokenizer has \d+ tokens, but 599 scores\n  to fix: download the file again"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, how: str, message: str) -> None:
    file = tmp_path / "m.gguf"
    metadata = {"llama__rope__scaling__type": "yarn"} if how == "yarn" else {}
    write(file, vocabulary=VOCABULARIES.get(how, of_bytes)(), **metadata)
    content = file.read_bytes()
    if how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "mamba":
        file.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(UserError, match=message):
        load_weights(file)
    assert not list((tmp_path / "cache").glob("**/made_from.json"))


@pytest.mark.campaign
@pytest.mark.slow
def test_a_real_model(gguf_file: Path) -> None:
    """SmolLM2-135M-Instruct: logits against transformers' own reading of the same file, relative to the largest."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(0))
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()(ids).logits
        ours = load_weights(gguf_file)(ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
