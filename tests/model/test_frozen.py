"""Partly frozen models: their memory, FLOPs and numbers of parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.hf_models import overrides
from tests.helpers.native_models import GPT2, LLAMA, TINY, build, folder_of
from tests.helpers.tiny import fit, tiny_config
from trainer import RunConfig, Trainer, UserError, load_config, load_weights
from trainer.export import command_line as export
from trainer.model.initial_weights import materialize
from trainer.model.network import build_network, flops_per_token
from trainer.model.parameters import local
from trainer.optim.optimizer import training_bytes

SEQ_LEN = 24


def counted(model: nn.Module) -> float:
    """Return the FLOPs per token by torch's counter, which counts attention scores without the causal mask.

    It does not know in-place addition of a product, which is counted as the out-of-place one.
    """
    tokens = torch.randint(0, 263, (1, SEQ_LEN))
    in_place = {torch.ops.aten.addmm_: lambda _, one, other, **__: 2 * one[0] * one[1] * other[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return counter.get_total_flops() / SEQ_LEN


def flops_with_all_scores(model: nn.Module, config: RunConfig | None = None) -> float:
    """Return our FLOPs per token, with the attention scores of later tokens, which torch counts."""
    whole = LLAMA.flops
    assert whole is not None
    squares = replace(LLAMA, flops=lambda config, seq_len: whole(config, 2 * seq_len))
    return flops_per_token(squares, TINY if config is None else config.model, model, SEQ_LEN)


@pytest.mark.parametrize(
    ("trained", "not_gone_back"),
    [
        (r".", 0),
        (r"head", 0),
        (r"layers\.1|head", 0),
        (r"layers\.0", 0),
        (r"tok_embeddings", 0),
        # The order of layers within a block is not known.  So if a part of it is trained, the backward pass is taken to
        # go through its attention and the inputs of w1 and w3.
        (r"layers\.\d\.feed_forward", 2 / 3 * 6 * 2 * 32 * SEQ_LEN + 2 * 2 * 32 * 64),
    ],
)
def test_flops_equal_torchs_count(trained: str, not_gone_back: float) -> None:
    """Forward for all layers, backward down to the first trained one, and weight gradients of trained ones only."""
    model = build(LLAMA, TINY)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    assert flops_with_all_scores(model) - not_gone_back == pytest.approx(counted(model), rel=1e-9)


@pytest.mark.parametrize(
    ("targets", "not_gone_back"),
    [
        # Into the first block nothing is gone back: not from the adapters of wq, wk and wv, nor through wk and wv, ...
        ("all-linear", 2 * (3 * 4 * 32 + 2 * 32 * 16)),
        # ... nor through its attention, nor from the adapter of w2.
        ("[w2]", 2 / 3 * 6 * 2 * 32 * SEQ_LEN + 2 * 4 * 64),
    ],
)
def test_flops_of_adapters_equal_torchs_count(targets: str, not_gone_back: float, tmp_path: Path) -> None:
    """Six per adapter weight, and four per weight of the adapted layer."""
    shape = [f"model.{key}={getattr(TINY, key)}" for key in ("dim", "num_heads", "num_kv_heads", "ffn_dim")]
    overrides = [*shape, "model.num_layers=2", "model.vocab_size=263", "lora.rank=4", f"lora.targets={targets}"]
    config = tiny_config(tmp_path, *overrides)
    model = build_network(config)
    materialize(model, 0, torch.device("cpu"))
    assert flops_with_all_scores(model, config) - not_gone_back == pytest.approx(counted(model), rel=1e-9)


def test_flops_without_a_formula_in_the_recipe() -> None:
    spec = replace(GPT2, flops=None)
    config = GPT2.config(vocab_size=263, dim=32, num_layers=2, num_heads=4, max_seq_len=64)
    model = build(spec, config)
    matrices = 12 * 32 * 32
    vectors = 13 * 32  # biases and norms of a block
    assert flops_per_token(spec, config, model, 8) == 6 * (2 * (matrices + vectors) + 2 * 32)
    model.blocks[0].requires_grad_(False)
    assert flops_per_token(spec, config, model, 8) == 6 * (2 * (matrices + vectors) + 2 * 32) - 2 * matrices


# ---------------------------------------------------------------------------------------------------------------
# Memory


class HeadAlone(Trainer):
    """Trains the head, and nothing that comes before."""

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        return model


@pytest.mark.parametrize("kind", [HeadAlone, pytest.param(Trainer, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.name=adamw"],
        ["train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16"],
        pytest.param(
            ["optim.name=muon", 'optim.groups=[{match: "head.output*", optimizer: muon}]'], marks=pytest.mark.campaign
        ),
        pytest.param(["optim.name=sgd"], marks=pytest.mark.campaign),
        pytest.param(["optim.name=sgd", "optim.momentum=0"], marks=pytest.mark.campaign),
    ],
    ids=" ".join,
)
def test_only_trained_parameters_have_gradients_and_moments(
    overrides: list[str], kind: type[Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the start block says of them is what there is after a step."""
    trainer = kind(tiny_config(tmp_path, "train.steps=1", "model.dim=32", *overrides))
    assert trainer.fit() == 0
    states = [state for part in trainer.optimizer.parts for state in part.state.values()]
    tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]
    parameters = [*trainer.model.parameters()]
    weights = sum(local(p).nbytes for p in parameters)
    gradients = sum(local(p).nbytes for p in parameters if p.requires_grad)
    moments = sum(local(tensor).nbytes for tensor in tensors)
    assert training_bytes(trainer.model, trainer.config.optim) == (weights, gradients, moments)
    trainer.close()
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"memory\s+([\d.]+) KiB per rank for weights, gradients and optimizer", printed)
    assert float(shown) == pytest.approx((weights + gradients + moments) / 1024, abs=0.01)


# ---------------------------------------------------------------------------------------------------------------
# train.freeze


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        ("[tok_embeddings]", {"tok_embeddings.weight"}),
        ("[layers.0.attention, head.norm.weight]", {"layers.0.attention.w*.weight", "head.norm.weight"}),
        ("['*norm*']", {"layers.?.*_norm.weight", "head.norm.weight"}),
        ("['layers.*.w1.*']", {"layers.?.feed_forward.w1.weight"}),
        ("[model.embed_tokens, 'model.layers.0.self_attn.*']", {"tok_embeddings.*", "layers.0.attention.*"}),
    ],
)
def test_named_parameters_are_frozen(patterns: str, frozen: set[str], tmp_path: Path) -> None:
    model = build_network(tiny_config(tmp_path, f"train.freeze={patterns}"))
    found = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert found == {n for n, _ in model.named_parameters() if any(fnmatchcase(n, form) for form in frozen)} != set()


def test_a_tied_weight_is_frozen_by_any_of_its_names(tmp_path: Path) -> None:
    model = build_network(tiny_config(tmp_path, "model.tie_embeddings=true", "train.freeze=[head.output]"))
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["tok_embeddings.weight"]


@pytest.mark.parametrize("patterns", ["[layers.0,tok_embedings]", "[embed_tokens]", "[layers.7]", "['*']"])
def test_pattern_without_a_match_is_rejected(patterns: str, tmp_path: Path) -> None:
    """Or one that leaves nothing to train. What is proposed instead freezes something."""
    with pytest.raises(UserError) as refused:
        build_network(tiny_config(tmp_path, f"train.freeze={patterns}"))
    assert str(refused.value).startswith("train.freeze=[")
    assert bool(refused.value.proposal) == (patterns != "['*']")
    if refused.value.proposal:
        model = build_network(tiny_config(tmp_path, refused.value.proposal))
        assert not all(parameter.requires_grad for parameter in model.parameters())


def test_frozen_weights_do_not_change_and_are_restored(tmp_path: Path) -> None:
    frozen = ["train.freeze=[tok_embeddings,layers.0]", "checkpoint.every=1"]

    def is_frozen(name: str) -> bool:
        return name.startswith(("tok_embeddings", "layers.0."))

    start = fit(tmp_path, "train.steps=2", *frozen)[0]
    weights = load_weights(tmp_path).state_dict()
    drawn = build_network(tiny_config(tmp_path))
    materialize(drawn, 0, torch.device("cpu"))
    for name, weight in drawn.state_dict().items():
        assert torch.equal(weight, weights[name]) == is_frozen(name), name
    trained = sum(p.numel() for name, p in drawn.named_parameters() if not is_frozen(name))
    assert start["trainable_parameters"] == trained < start["parameters"]
    fit(tmp_path, "train.steps=3", *frozen)
    with pytest.raises(UserError, match=r"train\.freeze"):
        fit(tmp_path, "train.steps=4")


def mixed_folder(path: Path) -> Path:
    """Write a folder in bfloat16 whose norms are in float32, with values that bfloat16 lacks."""
    folder = folder_of(path)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    norms = {name: 1 + torch.arange(t.numel()) / 999.0 for name, t in tensors.items() if "norm" in name}
    save_file({**tensors, **norms}, file, metadata={"format": "pt"})
    return folder


def exported(folder: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    assert export([str(folder), str(out), *options]) == 0
    (file,) = out.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize(
    ("own", "is_rounded"),
    [
        (["train.freeze=[head.norm,layers.0]", "train.weights_dtype=bfloat16"], True),
        (["train.freeze=[head.norm,layers.0]"], False),
        (["train.freeze=[layers.0.attention.wq]", "train.weights_dtype=bfloat16"], False),
        (["lora.rank=2"], False),
        (["lora.rank=2", "lora.base_dtype=bfloat16", "train.weights_dtype=bfloat16"], False),
    ],
)
def test_frozen_weights_are_exported_as_they_were_or_named(
    own: list[str], is_rounded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit by bit, once upcast; adapters leave the norms alone, whatever dtype the base has in training."""
    folder = mixed_folder(tmp_path / "folder")
    (file,) = folder.glob("*.safetensors")
    before = load_file(file)
    trainer = Trainer(
        load_config("llama_small", [*overrides(folder, *own, name="auto"), f"run.dir={tmp_path / 'run'}"])
    )
    assert trainer.fit() == 0
    trainer.close()
    warned = "frozen weights are stored in a wider dtype" in capsys.readouterr().err
    assert warned == is_rounded
    is_lora = own[0].startswith("lora")
    after = exported(tmp_path / "run", tmp_path / "out", *(["--merged"] if is_lora else []))
    frozen = [name for name in before if "norm" in name and (is_lora or "layers.0" in name or "model.norm" in name)]
    assert len(frozen) >= 3
    if "layers.0.attention.wq" in own[0]:
        frozen = ["model.layers.0.self_attn.q_proj.weight"]
    same = [torch.equal(after[name].float(), before[name].float()) for name in frozen]
    assert all(same) != is_rounded
