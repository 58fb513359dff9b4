"""GGUF files: converted once, to the model that was written to them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hf_models import GROUPED, model_from
from trainer import UserError, load_config, load_weights
from trainer.data.tokenizer import find_tokenizer

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

TOKENS = ["<|end|>", *(chr(c) for c in range(33, 127)), "Ġ", "he", "Ġt", "Ã©", "Ã", "©", "hello", "Ċ", "ĠĊ"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.1": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3 with other heads": ("qwen3", {"head_dim": 32}),
}


def plain_frequencies(config: Any) -> torch.Tensor:
    """Return the frequencies of RoPE without scaling."""
    return 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)


def write_gguf(path: Path, case: str, kind: str = "F32", split: str = "gpt-2", **metadata: Any) -> Any:
    """Write a tiny model as llama.cpp would, and return it.

    kind: how the matrices are stored.
    split: the rules that split text before encoding.
    metadata: further entries, by name.
    """
    architecture, changes = CASES[case]
    import transformers

    sizes = {
        **GROUPED,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
    }
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    model = model_from(getattr(transformers, f"{kinds[architecture]}Config")(**sizes, **changes))
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if "head_dim" in changes:
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["h e", "Ġ t", "Ã ©", "Ġ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for name, value in metadata.items():
        add[type(value)](name, value)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", (plain_frequencies(config) / model.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in state.items():
        if name == "lm_head.weight":  # tied
            continue
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:  # llama.cpp rotates neighbouring values
            weight = weight.view(heads[part], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        packed = gguf.quants.quantize(weight.contiguous().numpy(), stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which a test writes a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("case", list(CASES))
def test_logits_are_those_of_the_model_that_was_written(file: Path, case: str) -> None:
    """At positions that are so large that another scaling of RoPE would show."""
    written = write_gguf(file, case)
    ids = torch.randint(0, len(TOKENS), (1, 1000), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_weights(file)(ids), written(ids).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(load_weights(file)(ids), load_weights(file.parent)(ids)), "its folder, which has it alone"
        if case == "llama 3.1":
            del written.model.rotary_emb.inv_freq
            written.model.rotary_emb.inv_freq = plain_frequencies(written.config)
            difference = (load_weights(file)(ids) - written(ids).logits).abs().max()
            assert difference > 1e-3, "without the scaling, these positions would show it"


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "F32"), ("F16", "F16"), ("BF16", "BF16")])
def test_matrices_keep_the_values_and_the_dtype_that_they_are_stored_in(file: Path, kind: str, dtype: str) -> None:
    from safetensors import safe_open

    write_gguf(file, "qwen3", kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    load_weights(file)
    (converted,) = (file.parent / "cache").rglob("*.safetensors")
    with safe_open(converted, "pt") as content:
        assert content.get_slice("model.norm.weight").get_dtype() == "F32"
        for name, part in (("mlp.up_proj", "ffn_up"), ("self_attn.o_proj", "attn_output")):
            stored = tensors[f"blk.0.{part}.weight"]
            expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
            weight = content.get_slice(f"model.layers.0.{name}.weight")
            assert weight.get_dtype() == dtype
            assert torch.equal(weight[:].float(), torch.from_numpy(expected).view(weight.get_shape()))


def test_the_tokenizer_of_the_file(file: Path) -> None:
    """With the rules that transformers does not take from it: for digits, Llama 3's whole words, and Qwen's accents."""
    for split, text, expected in (
        ("gpt-2", "hello the", ["he", "l", "l", "o", "Ġt", "he"]),
        ("gpt-2", " \n1", ["Ġ", "Ċ", "1"]),
        ("smollm", " \n1", ["ĠĊ", "1"]),
        ("llama-bpe", "hello the", ["<|end|>", "hello", "Ġt", "he"]),
        ("qwen2", "e\u0301", ["Ã©"]),
    ):
        write_gguf(file, "llama", split=split)
        config = load_config("llama_small", ["model.name=auto", f"model.path={file}"], needs_weights=False)
        tokenizer = find_tokenizer(str(config.data.tokenizer))
        assert [TOKENS[number] for number in tokenizer.start_ids + tuple(tokenizer.encode(text))] == expected
        assert (Path(str(config.data.tokenizer)).parent / "chat_template.jinja").read_text() == TEMPLATE


def test_a_configuration_names_the_file(file: Path) -> None:
    write_gguf(file, "qwen3")
    config = load_config("llama_small", ["model.name=auto", f"model.path={file}", f"run.dir={file.parent / 'run'}"])
    assert (config.model.name, config.model.dim, config.model.vocab_size) == ("qwen3", 64, len(TOKENS))
    text = config.to_yaml()
    assert f"init_from: {file}\n" in text
    assert f"tokenizer: {file}\n" in text
    (file.parent / "mine.yaml").write_text(text)
    assert load_config(str(file.parent / "mine.yaml")).to_yaml() == text


def test_what_is_not_read_is_refused(file: Path) -> None:
    write_gguf(file, "qwen3")
    content = file.read_bytes()
    damaged = content[: len(content) // 2]
    other = content.replace(b"\5\0\0\0\0\0\0\0qwen3", b"\5\0\0\0\0\0\0\0mamba", 1)
    write_gguf(file, "llama", split="tekken")
    for wrong, reason in ((damaged, "complete"), (other, "mamba"), (file.read_bytes(), "tekken")):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match=f"^path={file}.*{reason}"):
            load_weights(file)
    assert not list((file.parent / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.rope.scaling.factor": 4.0}, "RoPE scaling 'linear'"),
        ({"llama.rope.scale_linear": 4.0}, "RoPE scaling 'linear'"),
        ({"llama.expert_count": 8}, "experts"),
    ],
)
def test_metadata_that_would_change_the_model_are_refused(
    file: Path, metadata: dict[str, str | int | float], reason: str
) -> None:
    """Also where no weights are read.  llama.cpp scales linearly if a factor is there without a type."""
    write_gguf(file, "llama", **metadata)
    with pytest.raises(UserError, match=f"^model.path={file}.*{reason}"):
        load_config("llama_small", ["model.name=auto", f"model.path={file}"], needs_weights=False)


def test_a_scaling_by_one_is_none(file: Path) -> None:
    written = write_gguf(file, "llama", **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0})
    ids = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        torch.testing.assert_close(load_weights(file)(ids), written(ids).logits, rtol=1e-5, atol=1e-5)


def test_files_next_to_it_do_not_matter_and_their_code_does_not_run(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a user would agree to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    settings = ["model.name=auto", f"model.path={file}"]
    contents = set()
    for text in (
        "",
        '{"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"}',
        '{"tokenizer_class": "BertTokenizer"}',
        "no JSON",
    ):
        write_gguf(file, "llama")
        if text:
            (file.parent / "tokenizer_config.json").write_text(text)
            code = "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n"
            (file.parent / "mine.py").write_text(f"open({str(file.parent / 'has_run')!r}, 'w')\n{code}")
        config = load_config("llama_small", settings, needs_weights=False)
        folder = Path(str(config.data.tokenizer)).parent
        contents.add(tuple(path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "made_from.json"))
    assert len(contents) == 1
    assert not (file.parent / "has_run").exists()


def test_a_folder_with_several_files_is_refused_with_the_name_of_one(file: Path) -> None:
    write_gguf(file, "llama")
    other = file.with_name("z.gguf")
    other.write_bytes(file.read_bytes())
    for key in ("model.path", "train.init_from"):
        with pytest.raises(UserError, match=rf"^{key}={file.parent}: (.|\n)*try {key}={file}"):
            load_config("llama_small", [f"{key}={file.parent}"])
    with pytest.raises(UserError, match=rf"^path={file.parent}: (.|\n)*try path={file}"):
        load_weights(file.parent)


def test_a_missing_library_is_one_message(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"(?s)^path=.*transformers.*meshtrainer\[gguf\]"):
        load_weights(file)
