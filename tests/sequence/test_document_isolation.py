"""Documents that share a row: each is processed and trained on as if it were alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.slices import LENGTHS, TINY, inputs, numbers, spans
from trainer import sequence
from trainer.loss import IGNORE, find_loss
from trainer.registry import find_model
from trainer.sequence import Documents, attend, attention, compute_cu_seqlens, positions


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    """Return attention by the formula, document by document."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    out = torch.zeros_like(q)
    for row, span in spans(lengths):
        scores = q[row, :, span] @ k[row, :, span].mT / q.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        out[row, :, span] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[row, :, span]
    return out


def check(found: torch.Tensor, given: list[torch.Tensor], lengths: list[list[int]]) -> None:
    expected = alone(*given, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("lengths", [LENGTHS, TINY], ids=["loop", "mask"])
@pytest.mark.parametrize("of_keys", [4, 2])
def test_each_document_equals_a_separate_row(lengths: list[list[int]], of_keys: int) -> None:
    documents = Documents.of(numbers(lengths))
    assert documents is not None
    assert documents.are_tiny == (lengths is TINY)
    given = inputs(lengths, of_keys=of_keys)
    check(attend(*given, documents), given, lengths)


def test_rows_are_concatenated_for_a_gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop stands in for the kernel and checks its inputs."""

    def kernel(q: Any, k: Any, v: Any, starts: Any, starts_of_keys: Any, longest: int, _: int, **more: Any) -> Any:
        assert more.get("window_size") == (-1, 0) or more.get("is_causal")
        assert starts is starts_of_keys
        assert starts.dtype == torch.int32
        assert longest == 32
        parts = [slice(start, end) for start, end in itertools.pairwise(starts.tolist())]
        heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        found = [attend(*(tensor[:, :, part] for tensor in heads)) for part in parts]
        return torch.cat(found, 2)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    given = inputs(LENGTHS)
    documents = Documents(numbers(LENGTHS))
    check(attention._attend_packed(*given, documents), given, LENGTHS)


def test_positions_and_document_boundaries() -> None:
    documents = numbers(LENGTHS)
    counted = positions(documents, None, Documents.of(documents))
    assert counted.tolist() == [[i for length in row for i in range(length)] for row in LENGTHS]
    assert positions(documents).tolist() == list(range(32))
    assert positions(documents, counted + 1).tolist() == (counted + 1).tolist()
    lengths = [length for row in LENGTHS for length in row]
    assert compute_cu_seqlens(documents).tolist() == [0, *itertools.accumulate(lengths)]


SHAPES: dict[str, dict[str, int]] = {
    "llama": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "vocab_size": 50},
    "gpt2": {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "max_seq_len": 32},
    "qwen3": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50},
    "qwen3_next": {
        "dim": 32,
        "num_layers": 2,
        "attention_every": 2,
        "num_heads": 4,
        "delta_key_dim": 8,
        "vocab_size": 50,
    },
    "qwen3_moe": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50},
    "gpt_oss": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50}
    | {"window": 7},
    "deepseek_v3": {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    spec = find_model(name)
    model = spec.build_model(spec.config(**SHAPES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # so that nothing is too small to matter
    return model


def batch_of(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    documents = numbers(lengths)
    tokens, targets = (torch.randint(50, documents.shape, generator=generator) for _ in range(2))
    targets[0, 3:9] = IGNORE
    return {"tokens": tokens, "targets": targets, "documents": documents}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_those_of_separate_documents(name: str) -> None:
    model, batch = build(name), batch_of(LENGTHS)
    loss_of = find_loss(model)
    total = 0.0
    for row, span in spans(LENGTHS):
        loss = loss_of({entry: batch[entry][row : row + 1, span] for entry in ("tokens", "targets")})
        loss.backward()
        total += loss.item()
    expected = gradients(model)
    loss = loss_of(batch)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-6)
    for found, right in zip(gradients(model), expected, strict=True):
        assert (found - right).norm() < 1e-5 * right.norm()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("lengths", [LENGTHS, TINY], ids=["loop", "mask"])
def test_documents_do_not_influence_each_other(name: str, lengths: list[list[int]]) -> None:
    model, batch = build(name), batch_of(lengths)
    model.eval()
    changed = batch["tokens"].clone()
    row, span = list(spans(lengths))[1]
    changed[row, span] = (changed[row, span] + 1) % 50
    given = {"documents": batch["documents"]}
    there = torch.zeros(changed.shape, dtype=torch.bool)
    there[row, span] = True
    with torch.no_grad():
        before, after = (model(tokens, **given) for tokens in (batch["tokens"], changed))
        joined = model(changed) - model(batch["tokens"])
    # How many tokens an expert gets decides how their products are added up, on several threads.
    tolerance = 1e-5 if find_model(name).experts else 0.0
    torch.testing.assert_close(after[~there], before[~there], rtol=0.0, atol=tolerance)
    assert joined[~there].abs().max() > 1e-3, "it would be seen"
    embedded: list[torch.Tensor] = []
    table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    table.register_forward_hook(lambda _, __, output: embedded.append(output))
    (influence,) = torch.autograd.grad(model(batch["tokens"], **given)[~there].sum(), embedded)
    assert influence[there].abs().max() == 0.0 < influence[~there].abs().max()


@pytest.mark.campaign
def test_compiled_blocks_accept_documents_of_any_length() -> None:
    """Without a graph per batch: torch recompiles only a few times before it gives up."""
    plain, model = build("llama"), build("llama")
    torch._dynamo.reset()
    for block in model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for seed in range(4):
            cuts = sorted(torch.randperm(31, generator=torch.Generator().manual_seed(seed))[: 2 + seed].tolist())
            lengths = [[b - a for a, b in itertools.pairwise([0, *(cut + 1 for cut in cuts), 32])]]
            batch = batch_of(lengths)
            losses = [find_loss(each)(batch) for each in (plain, model)]
            for loss in losses:
                loss.backward()
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert F.mse_loss(one, other).sqrt() < 1e-5 * one.abs().max()


def test_grouped_heads_are_repeated_if_no_kernel_supports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in fp32, where the scores of all pairs would be in memory."""
    assert not attention._supports_grouped_heads("cuda", torch.float32)
    assert attention._supports_grouped_heads("cuda", torch.bfloat16)
    assert attention._supports_grouped_heads("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 9, 8, generator=generator)
    k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(2))
    expected = sequence.attend(q, k, v)
    asked: list[bool] = []
    plain = F.scaled_dot_product_attention

    def attend(*tensors: torch.Tensor, enable_gqa: bool, **options: Any) -> torch.Tensor:
        asked.append(enable_gqa)
        return plain(*tensors, **options)

    monkeypatch.setattr(attention, "_supports_grouped_heads", lambda device_type, dtype: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(sequence.attend(q, k, v), expected)
    assert asked == [False]
