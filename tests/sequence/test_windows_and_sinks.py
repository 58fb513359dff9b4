"""Attention with a window, sinks, a custom scale and narrow values: every implementation equals the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.slices import LENGTHS, TINY, inputs, numbers, part_of, slices_of, spans
from trainer.sequence import Cache, Documents, attend, attention, use_slices

WHOLE = [[32]] * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "sinks": {"sinks": True},
    "both": {"window": 4, "sinks": True, "scale": 0.7},
    "window of a row": {"window": 32},
    "narrow values": {"width": 3, "scale": 0.7},
    "all": {"window": 7, "sinks": True, "width": 5},
}


def given_for(lengths: list[list[int]], options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return queries, keys and values, with sinks if there are any, and the arguments of `attend`."""
    q, k, v = inputs(lengths)
    v = v[..., : options.get("width", 8)].detach().requires_grad_()
    arguments = {name: value for name, value in options.items() if name in ("window", "scale")}
    if "sinks" not in options:
        return [q, k, v], arguments
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], requires_grad=True)
    return [q, k, v, sinks], arguments | {"sinks_N": sinks}


def by_formula(given: list[torch.Tensor], lengths: list[list[int]], arguments: dict[str, Any]) -> torch.Tensor:
    """Return attention document by document, with all scores."""
    q, k, v = given[:3]
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    rows = []
    for row, of_row in enumerate(lengths):
        outputs = []
        for _, span in (found for found in spans(lengths) if found[0] == row):
            scores = q[row, :, span] @ k[row, :, span].mT * arguments.get("scale", q.shape[-1] ** -0.5)
            age = torch.arange(scores.shape[-1])[:, None] - torch.arange(scores.shape[-1])
            scores = scores.masked_fill((age < 0) | (age >= arguments.get("window", 1000)), -torch.inf)
            if len(given) == 4:
                scores = torch.cat((scores, given[3][:, None, None].expand(*scores.shape[:2], 1)), -1)
            outputs.append(scores.softmax(-1)[..., : age.shape[0]] @ v[row, :, span])
        assert len(outputs) == len(of_row)
        rows.append(torch.cat(outputs, 1))
    return torch.stack(rows)


def check(found: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor]) -> None:
    """Compare outputs and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    both = [torch.autograd.grad((output * weights).sum(), given, retain_graph=True) for output in (found, expected)]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-6)


def kernel(q: Any, k: Any, v: Any, of_queries: Any, of_keys: Any, *sizes: int, **more: Any) -> Any:
    """Compute by a loop what the variable-length kernel does on a GPU."""
    assert k.is_contiguous()
    longest = (of_keys[1:] - of_keys[:-1]).max()
    assert sizes[0] <= sizes[1]
    assert longest <= sizes[1]
    options = attention.AttentionOptions(scale=more.get("scale"))
    found = []
    for number in range(len(of_keys) - 1):
        start, stop = of_queries[number : number + 2].tolist()
        first, last = of_keys[number : number + 2].tolist()
        if start < stop:
            heads = [x.transpose(0, 1)[None] for x in (q[start:stop], k[first:last], v[first:last])]
            found.append(attention.attend_full(*heads, None, options)[0].transpose(0, 1))
    return torch.cat(found)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_attend_per_document", attention._attend_packed)
    monkeypatch.setattr(Documents, "are_tiny", False)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [None, LENGTHS, TINY], ids=["rows", "loop", "mask"])
def test_one_rank_computes_the_formula(name: str, lengths: list[list[int]] | None) -> None:
    given, arguments = given_for(lengths or WHOLE, OPTIONS[name])
    documents = None if lengths is None else Documents.of(numbers(lengths))
    check(attend(*given[:3], documents, **arguments), by_formula(given, lengths or WHOLE, arguments), given)


@pytest.mark.parametrize("name", ["sinks", "narrow values"])
@pytest.mark.parametrize("lengths", [LENGTHS, TINY], ids=["long", "tiny"])
def test_rows_are_concatenated_with_a_sink_for_each_document(
    name: str, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    given, arguments = given_for(lengths, OPTIONS[name])
    documents = Documents.of(numbers(lengths))
    check(attend(*given[:3], documents, **arguments), by_formula(given, lengths, arguments), given)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["rows", "documents"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_slice_attends_to_its_sequence(
    name: str, lengths: list[list[int]] | None, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `gather`; the keys and values of other ranks are passed in without processes."""
    if is_packed:
        as_on_a_gpu(monkeypatch)
    given, arguments = given_for(lengths or WHOLE, OPTIONS[name])
    every = slices_of(2, "gather")
    parts = torch.stack([torch.cat([part_of(each, tensor, 2) for tensor in given[1:3]], -1) for each in every])
    monkeypatch.setattr(attention, "gather_parts", lambda part, num_parts, group: parts)
    found = torch.zeros(*given[0].shape[:3], given[2].shape[-1])
    for each in every:
        with use_slices(each):
            documents = None if lengths is None else Documents.of(numbers(lengths))
            out = attend(*(part_of(each, tensor, 2) for tensor in given[:3]), documents, **arguments)
        pieces = [torch.arange(start, stop) for start, stop in each.pieces]
        found = found.index_copy(2, torch.cat(pieces), out)
    check(found, by_formula(given, lengths or WHOLE, arguments), given)


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_are_exchanged_with_their_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `heads`; the exchange among ranks is done without processes, on what each rank would have sent."""
    given, arguments = given_for(LENGTHS, OPTIONS[name])
    expected = by_formula(given, LENGTHS, arguments)
    every, sent = slices_of(2, "heads"), []

    class Sent(Exception):
        pass

    def send(parts: torch.Tensor, group: str) -> torch.Tensor:
        sent.append(parts)
        raise Sent

    monkeypatch.setattr(attention, "exchange_parts", send)
    for each in every:
        with use_slices(each), pytest.raises(Sent):
            attend(*(part_of(each, tensor, 2) for tensor in given[:3]), None, **arguments)
    outputs = []
    for rank, each in enumerate(every):

        def receive(parts: torch.Tensor, group: str, rank: int = rank) -> torch.Tensor:
            if parts.shape == sent[0].shape:
                return torch.stack([other[rank] for other in sent])
            outputs.append(parts)
            raise Sent

        monkeypatch.setattr(attention, "exchange_parts", receive)
        with use_slices(each):
            documents = Documents.of(numbers(LENGTHS))
        with use_slices(each), pytest.raises(Sent):
            attend(*(part_of(each, tensor, 2) for tensor in given[:3]), documents, **arguments)
    found = torch.cat([torch.cat([*parts], 2) for parts in outputs], 1)
    check(found, expected, given)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [[20, 1, 1, 10], [1] * 32, [32]], ids=["prompt", "tokens", "whole"])
def test_cached_keys_give_the_same_output(name: str, sizes: list[int]) -> None:
    given, arguments = given_for(WHOLE, OPTIONS[name])
    cache, found, start = Cache(), [], 0
    with torch.no_grad():
        for size in sizes:
            q, k, v = (tensor[:, :, start : start + size] for tensor in given[:3])
            found.append(attend(q, k, v, cache, **arguments))
            cache.advance(size)
            start += size
    torch.testing.assert_close(torch.cat(found, 2), by_formula(given, WHOLE, arguments), rtol=1e-5, atol=1e-6)


def test_compiled_windows_need_no_graph_for_each_batch() -> None:
    given, arguments = given_for(LENGTHS, OPTIONS["all"])
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for lengths in (LENGTHS, [[3, 29], [8, 24], [31, 1], [16, 16]]):
            documents = Documents.of(numbers(lengths))
            found = compiled(*given[:3], documents, **arguments)
            check(found, by_formula(given, lengths, arguments), given)
