"""Packed base weights (lora.base_dtype=nf4, fp8): their values, gradients, memory, gathers and exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.adapters import config_of, overrides_of, trained
from tests.helpers.cases import in_campaign
from tests.helpers.hf_models import folder_of as hf_folder_of
from tests.helpers.hf_models import load_with_transformers, overrides
from tests.helpers.launch import REPOSITORY, command, merged, on_ranks, run, tiny
from tests.helpers.native_models import TINY, folder_of
from tests.helpers.plan_truth import as_logged, measure
from trainer import RunConfig, Trainer, UserError, load_config, load_weights
from trainer import run as run_command
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights
from trainer.config.parallel import MeshShape
from trainer.config.schema import LoraSection
from trainer.export import command_line as export_command
from trainer.model.lora import AdaptedLinear, add_adapters
from trainer.model.network import build_network, training_flops_per_token
from trainer.model.packed import BLOCK_SIZE, PackedLinear, Packing, find_packings
from trainer.model.parameters import count_parameters, count_trained_parameters, local
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan, without_data

WIDE = replace(TINY, dim=64, ffn_dim=192)
"""Its rows have 64 or 192 weights."""
PACKINGS = ["nf4", "fp8"]

NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""The sixteen levels of NF4 as bitsandbytes publishes them (QLoRA, arXiv:2305.14314, appendix E)."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama folder in Hugging Face format, in float32."""
    return folder_of(tmp_path / "base", config=WIDE)


# ---------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("shape", [(129, 512), (3, 40, 192)], ids=["matrix", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_scales_and_values_are_those_published_for_nf4(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each block of 64 weights is divided by its largest; each weight becomes the nearest of sixteen levels."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 0.02
    weight.view(-1, BLOCK_SIZE)[3] = 0
    weight.view(-1, BLOCK_SIZE)[5] *= 1e-30
    packing = Packing("nf4", shape[-1])
    packed = packing.pack(weight)

    levels, blocks = torch.tensor(NF4), weight.float().view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1, keepdim=True)
    distances = ((blocks / scales.clamp(min=1e-45))[..., None] - levels).abs()
    values = packing.unpack(packed, torch.float32)
    codes = packed[..., : shape[-1] // 2].reshape(-1, 1)
    found = torch.cat([codes >> 4, codes & 15], 1).view(-1, BLOCK_SIZE).long()
    assert torch.equal(packing.scales(packed).flatten(), scales.flatten())
    assert torch.equal(values.view(-1, BLOCK_SIZE), levels[found] * scales)
    chosen = distances.gather(2, found[..., None])[..., 0]
    assert (chosen <= distances.amin(2) + 1e-7).all(), "the nearest level, but for rounding in the middle of two"
    assert torch.equal(packing.unpack(packed, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize(("packing", "bits", "most"), [("nf4", 4.5, 0.16), ("fp8", 8.5, 1 / 16)])
def test_error_of_a_value_is_bounded(packing: str, bits: float, most: float) -> None:
    """By half the largest gap between two codes of NF4; by half a unit in the last place of e4m3."""
    weight = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 0, :64] = 0
    form = Packing(packing, 256)
    packed = form.pack(weight)
    assert packed.shape == (4, 8, 256 * bits / 8)
    difference = (form.unpack(packed, torch.float32) - weight).abs().view(-1, BLOCK_SIZE)
    largest = weight.abs().view(-1, BLOCK_SIZE).amax(dim=1, keepdim=True)
    allowed = most * (largest if packing == "nf4" else weight.abs().view(-1, BLOCK_SIZE).clamp(min=largest / 448))
    assert (difference <= allowed).all()
    assert not form.unpack(packed, torch.float32)[0, 0, :64].any()
    for parts in (2, 3, 4):  # any part of the rows packs to the same bytes
        assert torch.equal(torch.cat([form.pack(part) for part in weight.chunk(parts)]), packed)


@pytest.mark.parametrize("kind", ["linear", "Conv1D"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_gradients_follow_the_formula_and_only_bytes_are_saved(packing: str, kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)  # rounding reaches the tolerance with some numbers
    layer = nn.Linear(64, 128) if kind == "linear" else Conv1D(128, 64)
    whole: Any = nn.Sequential(layer)
    add_adapters(whole, [whole], LoraSection(rank=2, alpha=6.0, base_dtype=packing))  # type: ignore[arg-type]
    adapted = whole[0]
    form = adapted.base_layer.packings["weight"]
    adapted.base_layer.weight.data.copy_(form.pack(layer.weight.detach()))  # type: ignore[arg-type]
    rounded = form.rounded(layer.weight.detach())  # type: ignore[arg-type]
    rounded = rounded if kind == "linear" else rounded.t()
    down, up = adapted.factors
    nn.init.normal_(up)
    x = torch.randn(3, 5, 64)
    for is_enabled in (True, False):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        adapted.is_enabled = is_enabled
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = whole(ours)
        output.sin().sum().backward()
        expected = F.linear(theirs, rounded, layer.bias) + is_enabled * 3.0 * theirs @ down.detach().T @ up.detach().T
        expected.sin().sum().backward()
        torch.testing.assert_close((output, ours.grad), (expected, theirs.grad))
        assert any(tensor.dtype == torch.uint8 for tensor in saved)
        assert not any(tensor.is_floating_point() and tensor.numel() >= 64 * 128 for tensor in saved)


def test_linear_layers_of_the_blocks_are_packed_whether_adapted_or_not() -> None:
    def network(*overrides: str) -> tuple[RunConfig, nn.Module]:
        config = load_config("llama_small", tiny("model.dim=64", "model.ffn_dim=192", *overrides))
        config = replace(config, lora=replace(config.lora, rank=4, targets=["wq"], base_dtype="nf4"))
        return config, build_network(config)

    config, model = network()
    assert {name.partition(".")[2].partition(".")[2] for name in find_packings(model)} == {
        *("attention.wq.base_layer.weight", "attention.wk.weight", "attention.wv.weight", "attention.wo.weight"),
        *("feed_forward.w1.weight", "feed_forward.w2.weight", "feed_forward.w3.weight"),
    }
    assert {parameter.dtype for parameter in model.parameters()} == {torch.uint8, torch.float32}
    plain = build_network(replace(config, lora=replace(config.lora, base_dtype="float32")))
    assert count_parameters(model) == count_parameters(plain)
    assert count_trained_parameters(model) == count_trained_parameters(plain)
    assert training_flops_per_token(config, model, 32) == training_flops_per_token(config, plain, 32)
    _, half = network("fsdp.param_dtype=bfloat16")
    dtypes = Counter(parameter.dtype for parameter in half.parameters() if not parameter.requires_grad)
    assert dtypes.keys() == {torch.uint8, torch.bfloat16}, "the others in the dtype of computation"


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("has_base", "override", "setting"),
    [
        (True, "lora.rank=0", "lora.base_dtype=nf4"),
        (True, "lora.base_dtype=int4", "lora.base_dtype=int4"),
        (False, "model.dim=64", "lora.base_dtype=nf4"),  # random weights are not worth packing
    ],
)
def test_mistakes(has_base: bool, override: str, setting: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = overrides_of(base if has_base else None, base.parent / "run", "lora.base_dtype=nf4")
    given = [item for item in merged(given, [override]) if not item.startswith("lora.alpha")]
    assert run_command.main(["recipe=llama_small", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {setting}")
    assert not (base.parent / "run").exists()


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_that_cannot_be_packed_are_refused(packing: str, base: Path, tmp_path: Path) -> None:
    """Rows that blocks of 64 do not divide, and weights that are not finite."""
    own = f"lora.base_dtype={packing}"
    narrow = folder_of(tmp_path / "narrow", config=replace(WIDE, ffn_dim=96))
    with pytest.raises(UserError, match=rf"^lora\.base_dtype={packing}.* 96 .*w2"):
        Trainer(config_of(narrow, tmp_path / "run", own))
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] = torch.nan
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.feed_forward\.w2"):
        Trainer(config_of(base, tmp_path / "run", own))


def test_torch_that_converts_bytes_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(UserError, match=r"^lora\.base_dtype=nf4: .*torch 2\.13"):
        Trainer(config_of(base, tmp_path / "run", "lora.base_dtype=nf4", "fsdp.param_dtype=bfloat16"))


# ---------------------------------------------------------------------------------------------------------------
# On ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "own", "packing"),
    [
        (2, ["fsdp.param_dtype=bfloat16"], "nf4"),
        *in_campaign(
            (1, [], "fp8"),
            (3, ["train.global_batch_size=12"], "nf4"),
            (2, ["train.activation_checkpoint=full"], "fp8"),
            (2, ["mesh.context=2", "mesh.context_method=gather"], "nf4"),
            (4, ["mesh.replicate=2", "train.global_batch_size=16"], "nf4"),
        ),
    ],
)
def test_ranks_hold_and_gather_the_bytes_of_packed_weights(
    ranks: int, own: list[str], packing: str, tmp_path: Path
) -> None:
    """Their share of 4.5 or 8.5 bits a weight; memory and collectives of a real step are as planned."""
    base = folder_of(tmp_path / "base", config=replace(WIDE, dim=128, num_layers=2, ffn_dim=384, vocab_size=512))
    given = [f"train.init_from={base}", "data.source=synthetic", "run.threads=1", "train.micro_batch_size=2"]
    given += ["train.global_batch_size=8", "data.seq_len=64", "lora.rank=8", f"lora.base_dtype={packing}"]
    given = merged([*given, "run.device=cpu", f"run.dir={tmp_path / 'run'}"], own)
    config = without_data(load_config("llama_small", given))
    shape = MeshShape(max(1, config.mesh.replicate), ranks // max(1, config.mesh.replicate))
    plan = make_plan(config, shape, find_machine("cpu"))
    bits = {"nf4": 4.5, "fp8": 8.5}[packing]
    found = on_ranks(ranks, measure_packed, given)
    for held, weights, _, collectives in found:
        share = weights * bits / 8 / shape.shard
        assert held <= 1.05 * share if ranks == 3 else held == share
        assert collectives == as_logged(plan.collectives)
    # On a busy machine a rank may free a buffer of a collective a moment later than planned.
    ratios = [plan.memory.peak.total / peak for _, _, peak, _ in found]
    assert min(abs(ratio - 1) for ratio in ratios) < 0.05, ratios


def measure_packed(overrides: list[str]) -> tuple[int, int, int, Counter[Any]]:
    """Return the bytes of packed weights on this rank, their number, and the peak and collectives of a third step."""
    trainer = Trainer(load_config("llama_small", overrides))
    packings = find_packings(trainer.model)
    packed = {name: trainer.model.get_parameter(name) for name in packings}
    held = sum(local(parameter).nbytes for parameter in packed.values())
    weights = sum(parameter.shape[0] * packings[name].width for name, parameter in packed.items())
    trainer.close()
    return (held, weights, *measure("llama_small", overrides))


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints and exports


@pytest.mark.parametrize("packing", ["nf4", pytest.param("fp8", marks=pytest.mark.campaign)])
def test_exports_are_the_function_that_was_trained(
    packing: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"lora.base_dtype={packing}", "lora.targets=[wq,w2]", "optim.lr=0.1", "train.steps=3"]
    folder = trained(base, tmp_path / "run", *own)
    checkpoint = StoredWeights(find_checkpoint(folder))
    assert all(".lora_" in name for name in checkpoint.shapes), "no byte of the base"
    assert checkpoint.parts["base"]["path"] == str(base)

    def exported(name: str, *options: str) -> Path:
        assert export_command([str(folder), str(tmp_path / name), *options]) == 0, capsys.readouterr().err
        return tmp_path / name

    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = load_weights(folder)(tokens)
        merged_weights = load_weights(exported("merged", "--merged"))(tokens)
        original = load_weights(exported("original", "--merged=original"))(tokens)
    torch.testing.assert_close(merged_weights, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert (original - expected).abs().max() > 1e-3 * expected.abs().max(), "another function"

    before, after, into = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged", "original"))
    only_packed, adapted = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(after[only_packed], Packing(packing, 64).rounded(before[only_packed]))
    torch.testing.assert_close(
        after[adapted] - Packing(packing, 192).rounded(before[adapted]), into[adapted] - before[adapted]
    )
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert (exported("adapter") / "adapter_model.safetensors").exists()


@pytest.mark.campaign
def test_base_in_bfloat16_is_merged_in_bfloat16_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    folder = trained(base, tmp_path / "run", "lora.base_dtype=nf4", "optim.lr=0.1")
    model = load_weights(folder)
    layer: Any = model.get_submodule("layers.0.feed_forward.w2")
    assert isinstance(layer, AdaptedLinear)
    assert isinstance(layer.base_layer, PackedLinear)
    down, up = layer.factors
    expected = layer.base_layer.unpacked(layer.base_layer.weight, torch.float32) + layer.scaling * up @ down
    for options, dtype in (([], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        assert export_command([str(folder), str(tmp_path / "out"), "--merged", "--overwrite", *options]) == 0
        found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-9)


def test_resume_with_another_base_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it packs to the same bytes: the checksum is that of the weights before packing."""
    folder = trained(base, tmp_path / "run", "lora.base_dtype=nf4")
    tensors = load_file(base / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    changed = weight.clone()
    changed[0, 1 if weight[0, 0] == weight[0].abs().max() else 0] *= 1 + 1e-6
    form = Packing("nf4", 192)
    assert torch.equal(form.pack(weight), form.pack(changed))
    assert not torch.equal(weight, changed)
    tensors["model.layers.1.mlp.down_proj.weight"] = changed
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"train\.init_from={base}"):
        trained(base, folder, "lora.base_dtype=nf4", "train.steps=4")
    assert export_command([str(folder), str(tmp_path / "out"), "--merged"]) == 2
    assert str(base) in capsys.readouterr().err
    with pytest.raises(UserError, match=r"lora\.base_dtype"):
        trained(base, folder, "lora.base_dtype=fp8", "train.steps=4")
    save_file({**tensors, "model.layers.1.mlp.down_proj.weight": weight}, base / "model.safetensors", {"format": "pt"})
    trained(base, folder, "lora.base_dtype=fp8", "train.steps=4", "checkpoint.allow_changes=[lora.base_dtype]")
    assert StoredWeights(find_checkpoint(folder)).manifest.step == 4


@pytest.mark.campaign
def test_what_else_a_run_does_with_its_model(base: Path, tmp_path: Path) -> None:
    """Evaluations, norms by layer, an average of the weights, a sample; then the commands that load it."""
    (tmp_path / "text.txt").write_text("so many words, one after another, are read from a file. " * 200)
    given = [f"train.init_from={base}", "lora.rank=4", "lora.base_dtype=nf4", f"data.path={tmp_path / 'text.txt'}"]
    given += [f"data.eval_path={tmp_path / 'text.txt'}", "data.tokenizer=bytes", f"data.cache_dir={tmp_path / 'cache'}"]
    given += ["eval.every=2", "eval.steps=1", "log.norms_every=2", "train.ema=0.5", "log.sample_tokens=4"]
    shaped = [item for item in tiny(*given, "train.steps=4") if not item.startswith("model.")]
    ran = run(tmp_path / "run", "recipe=llama_small", *shaped, "nproc=2")
    assert {"eval", "norms", "train", "end"} <= {line["kind"] for line in ran.metrics}
    command("trainer.evaluate", tmp_path / "run")
    command("trainer.generate", tmp_path / "run", "--prompt", "so many", "--greedy", "--max-tokens", 3)
    command("trainer.export", tmp_path / "run", tmp_path / "merged", "--merged", "--ema")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_models_of_transformers_are_packed(kind: str, tmp_path: Path) -> None:
    """Trained, merged, and loaded by transformers: the logits of the run."""
    sizes = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
    base = hf_folder_of(tmp_path / "base", kind, **sizes, **({"moe_intermediate_size": 64} if "moe" in kind else {}))
    own = ["lora.rank=4", "lora.base_dtype=nf4", "optim.lr=0.05", f"run.dir={tmp_path / 'run'}"]
    trainer = Trainer(load_config("llama_small", overrides(base, *own)))
    assert find_packings(trainer.model)
    assert trainer.fit() == 0
    trainer.close()
    tokens = torch.arange(40).view(2, 20)
    assert export_command([str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0
    with torch.no_grad():
        expected = load_weights(tmp_path / "run")(tokens)
        found = load_with_transformers(tmp_path / "merged")[0].eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


# ---------------------------------------------------------------------------------------------------------------
# The table of the documentation

PUBLISHED = {
    "Llama 3 8B": ["llama3_8b"],
    "Qwen3 32B": [
        *("qwen3_8b", "model.dim=5120", "model.num_layers=64", "model.num_heads=64", "model.ffn_dim=25600"),
    ],
    "Llama 3 70B": ["llama3_70b"],
    "gpt-oss 20B": ["gpt_oss_20b"],
    "Qwen3 30B-A3B": ["qwen3_30b_a3b"],
    "gpt-oss 120B": ["gpt_oss_120b", "mesh.expert=1"],
}
CARDS = {"rtx4090": "24 GB", "l40s": "48 GB", "h100": "80 GB"}


@pytest.mark.campaign
def test_table_of_models_is_the_planners() -> None:
    text = (REPOSITORY / "docs" / "four_bits.md").read_text()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "B | " in line]
    assert [*planned_rows()] == [row for row in rows if row[0] in PUBLISHED]


def planned_rows() -> Iterator[list[str]]:
    """Yield the rows of the table: model, GPUs, GiB needed in nf4, fp8 and bfloat16, and the smallest card for nf4."""
    own = ["lora.rank=16", "data.seq_len=2048", "train.micro_batch_size=1", "train.activation_checkpoint=full"]
    for model, (recipe, *shape) in PUBLISHED.items():
        for num_ranks in (1, 2, 4, 8):
            needed, smallest = [], "-"
            for base_dtype in ("nf4", "fp8", "bfloat16"):
                more = [f"lora.base_dtype={base_dtype}", f"train.global_batch_size={num_ranks}", "train.compile=false"]
                config = without_data(load_config(recipe, [*shape, *own, *more], needs_weights=False))
                plans = [make_plan(config, MeshShape(1, num_ranks), find_machine(card)) for card in CARDS]
                needed.append(f"{plans[-1].needed_gib:.1f}")
                if base_dtype == "nf4":
                    fitting = (size for plan, size in zip(plans, CARDS.values(), strict=True) if plan.fits)
                    smallest = next(fitting, "-")
            yield [model, str(num_ranks), *needed, smallest]
