"""The gated delta rule and its convolutions equal the recurrence, token by token; so do documents, slices, a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.slices import part_of, slices_of
from trainer.sequence import Cache, Documents, causal_convolution, gated_delta_rule, linear_attention, use_slices

LENGTHS = [[70, 1, 57, 128], [256], [3, 125, 100, 28]]
"""Lengths of the documents in each row: within chunks of 64 tokens, across them, and ending with them."""


def numbers(lengths: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])


def inputs() -> list[torch.Tensor]:
    """Return queries, keys, values, decays and rates of 3 rows, 256 tokens and 2 heads."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(3, 256, 2, 4, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(3, 256, 2, 6, generator=generator)
    decay, beta = (torch.rand(3, 256, 2, generator=generator) for _ in range(2))
    return [tensor.requires_grad_() for tensor in (q, k, v, -0.3 * decay, beta)]


def recurrence(given: list[torch.Tensor], documents: torch.Tensor | None) -> torch.Tensor:
    """Compute the rule by its definition, in float64."""
    q, k, v, decay, beta = (tensor.double() for tensor in given)
    state, outputs = q.new_zeros(3, 2, 4, 6), []
    for t in range(256):
        if documents is not None and t:
            same = documents[:, t] == documents[:, t - 1]
            state = torch.where(same[:, None, None, None], state, 0)
        state = state * decay[:, t].exp()[..., None, None]
        read = torch.einsum("bnhe,bnh->bne", state, k[:, t])
        written = beta[:, t][..., None] * (v[:, t] - read)
        state = state + k[:, t][..., None] * written[..., None, :]
        outputs.append(torch.einsum("bnhe,bnh->bne", state, q[:, t]))
    return torch.stack(outputs, 1)


def convolution(given: list[torch.Tensor], documents: torch.Tensor | None) -> torch.Tensor:
    """Compute a convolution by its definition, in float64."""
    x, weight = (tensor.double() for tensor in given)
    outputs = []
    for t in range(256):
        total = torch.zeros_like(x[:, 0])
        for distance in range(min(weight.shape[1], t + 1)):
            term = x[:, t - distance] * weight[:, -1 - distance]
            if documents is not None:
                term = torch.where((documents[:, t] == documents[:, t - distance])[:, None], term, 0)
            total = total + term
        outputs.append(total)
    return torch.stack(outputs, 1)


def of_convolution() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 256, 5), (5, 4))]


RULES: dict[str, tuple[Any, Any, Any, int]] = {
    "delta rule": (gated_delta_rule, recurrence, inputs, 5),
    "convolution": (causal_convolution, convolution, of_convolution, 1),
}
"""Ours, the definition, its inputs, and how many of these have tokens."""


def compare(found: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pairs = [torch.autograd.grad((output * weights).sum(), given) for output in (found, expected)]
    for mine, theirs in zip(*pairs, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("rule", RULES)
def test_result_equals_the_recurrence(rule: str, packed: bool) -> None:
    ours, definition, make, _ = RULES[rule]
    given, documents = make(), numbers(LENGTHS) if packed else None
    compare(ours(*given, Documents.of(documents)), definition(given, documents), given)


@pytest.mark.parametrize("rule", RULES)
def test_no_gradient_crosses_a_border(rule: str) -> None:
    ours, _, make, num_of_tokens = RULES[rule]
    given, documents = make(), numbers(LENGTHS)
    tested = torch.zeros(documents.shape, dtype=torch.bool)
    tested[0, 71:128] = tested[1] = tested[2, 128:228] = True
    output = ours(*given, Documents.of(documents))
    for gradient in torch.autograd.grad(output[tested].sum(), given[:num_of_tokens]):
        assert (gradient[~tested] == 0).all()
        assert (gradient[tested] != 0).any()


@pytest.mark.parametrize("rule", RULES)
def test_cache_continues_a_text(rule: str) -> None:
    ours, definition, make, num_of_tokens = RULES[rule]
    given, cache, outputs, start = make(), Cache(), [], 0
    for length in (100, 1, 1, 2, 130, 22):
        parts = [tensor[:, start : start + length] for tensor in given[:num_of_tokens]]
        outputs.append(ours(*parts, *given[num_of_tokens:], cache))
        cache.advance(length)
        start += length
    expected = definition(given, None).float()
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    ("count", "method"), [(2, "gather"), pytest.param(4, "gather", marks=pytest.mark.campaign), (4, "heads")]
)
@pytest.mark.parametrize("rule", RULES)
def test_slices_equal_the_whole_sequence(
    rule: str, count: int, method: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what other ranks send passed in without processes: it depends on their own tokens alone."""
    ours, definition, make, num_of_tokens = RULES[rule]
    given, every, sent, found = make(), slices_of(count, method, 256), [], []

    def run(slices: Any) -> torch.Tensor:
        with use_slices(slices):
            parts = [part_of(slices, tensor, 1) for tensor in given[:num_of_tokens]]
            documents = Documents.of(numbers(LENGTHS)) if packed else None
            return ours(*parts, *given[num_of_tokens:], documents)

    def record(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
        sent.append(part)
        return torch.stack([part] * num_parts)

    monkeypatch.setattr(linear_attention, "gather_parts", record)
    for each in every:
        run(each)
    assert sum(part.numel() for part in sent) <= given[0].numel() * count / 4, "small messages"
    gathered = torch.stack(sent)
    monkeypatch.setattr(linear_attention, "gather_parts", lambda *_: gathered)
    found = [run(each) for each in every]
    for output in found:  # else its rank would not take part in a collective of the backward pass
        assert torch.autograd.grad(output.sum(), gathered, retain_graph=True, allow_unused=True)[0] is not None
    whole = definition(given, numbers(LENGTHS) if packed else None)
    expected = torch.cat([part_of(each, whole, 1) for each in every], 1)
    compare(torch.cat(found, 1), expected, given)


@pytest.mark.parametrize(("count", "method"), [(2, "gather"), (4, "heads"), (8, "heads")])
def test_convolution_spans_pieces_shorter_than_its_taps(
    count: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 1 and 2 tokens, 4 taps."""
    x, weight = of_convolution()
    x, every, sent = x[:, :8], slices_of(count, method, 8), []
    documents = Documents.of(numbers([[5, 2, 1], [8], [1, 1, 6]]))

    def run(slices: Any) -> torch.Tensor:
        with use_slices(slices):
            return causal_convolution(part_of(slices, x, 1), weight, documents)

    def record(part: torch.Tensor, num_parts: int, group: str) -> torch.Tensor:
        sent.append(part)
        return torch.stack([part] * num_parts)

    monkeypatch.setattr(linear_attention, "gather_parts", record)
    for each in every:
        run(each)
    gathered = torch.stack(sent)
    monkeypatch.setattr(linear_attention, "gather_parts", lambda *_: gathered)
    whole = causal_convolution(x, weight, documents)
    for each in every:
        torch.testing.assert_close(run(each), part_of(each, whole, 1))


@pytest.mark.parametrize("method", ["gather", "heads"])
def test_slice_keeps_as_much_as_a_row_of_its_length(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the backward pass needs, only the gathered maps are more, and they do not grow with the sequence."""
    monkeypatch.setattr(linear_attention, "gather_parts", lambda part, num_parts, _: torch.stack([part] * num_parts))

    def kept(slices: Any) -> int:
        given = [torch.rand(1, 1024, 1, *width, requires_grad=True) for width in ([32], [32], [32], [], [])]
        saved: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with use_slices(slices), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            gated_delta_rule(*given)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    assert kept(slices_of(2, method, 2048)[0]) <= 1.05 * kept(None)
