"""GGUF files: converted once, to the model that transformers reads from the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.hf_models import model_of
from trainer import UserError, load_config, load_weights

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

TOKENS = ["<|end|>", *(chr(c) for c in range(33, 127)), "Ġ", "he", "Ġt"]


def write_gguf(path: Path) -> None:
    """Write a tiny Qwen3 as llama.cpp would, in blocks of eight bits."""
    model = model_of(
        "qwen3", hidden_size=64, intermediate_size=128, vocab_size=len(TOKENS), head_dim=128
    )  # which transformers assumes
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        values = tensor.numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_logits_are_those_of_transformers_from_the_same_file(file: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = torch.arange(40)[None] % len(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(load_weights(file)(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(load_weights(file)(ids), load_weights(file.parent)(ids)), "its folder, which has it alone"


def test_a_configuration_names_the_file(file: Path) -> None:
    config = load_config("llama_small", ["model.name=auto", f"model.path={file}", f"run.dir={file.parent / 'run'}"])
    assert (config.model.name, config.model.dim, config.model.vocab_size) == ("qwen3", 64, len(TOKENS))
    text = config.to_yaml()
    assert f"init_from: {file}\n" in text
    assert f"tokenizer: {file}\n" in text
    (file.parent / "mine.yaml").write_text(text)
    assert load_config(str(file.parent / "mine.yaml")).to_yaml() == text


def test_what_is_not_read_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for damaged in (
        content[: len(content) // 2],
        content.replace(b"\5\0\0\0\0\0\0\0qwen3", b"\5\0\0\0\0\0\0\0mamba", 1),
    ):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"^path={file}"):
            load_weights(file)
    assert not list((file.parent / "cache").glob("**/*.safetensors"))
