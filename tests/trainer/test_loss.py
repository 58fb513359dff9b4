"""The loss: value and gradients of PyTorch's cross-entropy, without ever having all logits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.launch import tiny
from trainer import UserError, load_config, token_logprobs
from trainer.loss import IGNORE, by_row, count_targets, cross_entropy, find_loss, linear_cross_entropy
from trainer.model.initial_weights import materialize

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
NUM_ROWS, WIDTH, VOCAB = 24, 8, 50
ROW_BYTES = 4 * VOCAB


def inputs(
    dtype: torch.dtype = torch.float32, ignored: str = "some"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden (2, 12, 8), weight (50, 8) and targets (2, 12), of which some, none or all are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, NUM_ROWS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (2, NUM_ROWS // 2), generator=generator)
    if ignored == "some":
        targets[0, 3:9] = IGNORE  # all of a small chunk
        targets[1, ::3] = IGNORE
    elif ignored == "all":
        targets[:] = IGNORE
    return hidden, weight, targets


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss and both gradients of PyTorch's own, in fp64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((found.detach().double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 12, NUM_ROWS - 1, NUM_ROWS, NUM_ROWS + 1, 1000])
def test_value_and_gradients_equal_pytorchs(rows: int, ignored: str, dtype: torch.dtype, device: str) -> None:
    """Measured: at most 5e-7. Logits are always fp32, so fp64 inputs are not more accurate."""
    hidden, weight, targets = (tensor.to(device) for tensor in inputs(dtype, ignored))
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=rows * ROW_BYTES)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    for found, expected in zip((loss, *gradients), exact(hidden, weight, targets), strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) < 2e-6
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]


def test_a_chunk_smaller_than_a_row_is_one_row() -> None:
    hidden, weight, targets = inputs()
    assert error(linear_cross_entropy(hidden, weight, targets, chunk_bytes=1), exact(hidden, weight, targets)[0]) < 2e-6


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_batch_without_targets(rows: int) -> None:
    hidden, weight, targets = inputs(ignored="all")
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=rows * ROW_BYTES)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.count_nonzero() == 0
    assert weight.grad.count_nonzero() == 0


def test_ignored_targets_get_no_gradient_and_change_nothing() -> None:
    hidden, weight, targets = inputs()
    counted = targets != IGNORE
    loss = linear_cross_entropy(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient[~counted].count_nonzero() == 0
    assert error(linear_cross_entropy(hidden[counted], weight, targets[counted]), loss.detach().double()) < 1e-6
    assert count_targets(targets) == int(counted.sum()) == 14


@pytest.mark.parametrize("scale", [3.0, -0.25])
def test_gradients_are_scaled_by_the_upstream_gradient(scale: float) -> None:
    hidden, weight, targets = inputs()
    (scale * linear_cross_entropy(hidden, weight, targets, chunk_bytes=5 * ROW_BYTES)).backward()
    _, hidden_grad, weight_grad = exact(hidden, weight, targets)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert error(hidden.grad, scale * hidden_grad) < 2e-6
    assert error(weight.grad, scale * weight_grad) < 2e-6


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_one_gradient_is_needed(wanted: str) -> None:
    """With a frozen head, or frozen layers below it."""
    hidden, weight, targets = inputs()
    frozen, other = (weight, hidden) if wanted == "hidden" else (hidden, weight)
    frozen.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, chunk_bytes=5 * ROW_BYTES).backward()
    expected = exact(hidden, weight, targets)[1 if wanted == "hidden" else 2]
    assert frozen.grad is None
    assert other.grad is not None
    assert error(other.grad, expected) < 2e-6


def test_non_contiguous_inputs() -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden.transpose(0, 1), weight, targets.T, chunk_bytes=5 * ROW_BYTES)
    assert error(loss, exact(hidden, weight, targets)[0]) < 2e-6


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden * 1e4, weight, targets, chunk_bytes=5 * ROW_BYTES)
    assert error(loss, exact(hidden * 1e4, weight, targets)[0]) < 2e-6
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_bf16(rows: int, device: str) -> None:
    """Only the logits and their gradient are rounded to bf16 (8 bits): measured 6e-3."""
    hidden, weight, targets = (tensor.to(device) for tensor in inputs(torch.bfloat16))
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=rows * ROW_BYTES)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
    for found, expected in zip((loss, *gradients), exact(hidden, weight, targets), strict=True):
        assert error(found, expected) < 1e-2


def test_many_chunks_in_bf16_lose_no_precision() -> None:
    """Accumulated in bf16, 4096 chunks would lose terms below 1/256 of the sum: an error of 0.2 and more."""
    num_rows = 4096
    hidden = torch.ones(num_rows, 4, dtype=torch.bfloat16)
    weight = torch.zeros(16, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(num_rows, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * 16)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert error(gradient, exact(hidden, weight, targets)[2]) < 1e-2


class Watch(TorchDispatchMode):
    """Notes the size of the largest tensor that any operator returns, and how many matrix products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.num_products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.largest = max([self.largest, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        self.num_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return result


def test_full_logits_never_exist() -> None:
    num_rows, width, vocab, chunk = 512, 8, 1000, 16
    hidden = torch.randn(num_rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (num_rows,))
    with Watch() as chunked:
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * vocab * chunk).backward()
    assert chunked.largest == chunk * vocab
    with Watch() as plain:
        cross_entropy(hidden @ weight.T, targets).backward()
    assert plain.largest == num_rows * vocab, "the watch sees them where they do exist"


def test_without_gradients_only_the_loss_is_computed() -> None:
    """Evaluation does not compute gradients: one matrix product per chunk instead of three."""
    hidden, weight, targets = inputs()
    expected = linear_cross_entropy(hidden, weight, targets).detach()
    with torch.no_grad(), Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=6 * ROW_BYTES)
    assert not loss.requires_grad
    assert error(loss, expected.double()) < 1e-6
    assert watch.num_products == NUM_ROWS // 6


class Logits(nn.Module):
    """A model that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(tokens))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_a_loss_for_each_sequence(rows: int, device: str) -> None:
    """With different upstream gradients; compared with PyTorch's loss in fp64."""
    hidden, weight, targets = (tensor.to(device) for tensor in inputs())
    scale = torch.tensor([0.25, -3.0], device=device)
    losses = linear_cross_entropy(hidden, weight, targets, chunk_bytes=rows * ROW_BYTES, reduction="row")
    gradients = torch.autograd.grad(losses @ scale, (hidden, weight))
    double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = double[0] @ double[1].T
    of_tokens = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none")
    expected = of_tokens.view(targets.shape).sum(-1)
    assert losses.shape == (2,)
    assert error(losses, expected.detach()) < 1e-6
    for found, right in zip(gradients, torch.autograd.grad(expected @ scale.double(), double), strict=True):
        assert error(found, right) < 1e-6


@pytest.mark.parametrize("linear", [True, False])
def test_summed_losses_of_sequences_lose_no_precision(linear: bool) -> None:
    """An fp32 sum of 4000 losses near 5 is off by more than one step changes the loss of a token."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 4000, 8, generator=generator), torch.randn(50, 8, generator=generator)
    targets = torch.randint(50, (2, 4000), generator=generator)
    logits = hidden @ weight.T
    of_tokens = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    with by_row():
        found = linear_cross_entropy(hidden, weight, targets) if linear else cross_entropy(logits, targets)
    torch.testing.assert_close(found, of_tokens.double().sum(-1), rtol=1e-8, atol=0)
    assert linear_cross_entropy(hidden, weight, targets, reduction="row").dtype == torch.float32


class OwnLoss(Logits):
    """A model that sums its own loss."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits if targets is None else 7 * cross_entropy(logits, targets)


@pytest.mark.parametrize(("kind", "factor"), [(Logits, 1), (OwnLoss, 7)])
def test_loss_of_models_with_and_without_targets(kind: type[Logits], factor: int) -> None:
    torch.manual_seed(0)
    model, targets = kind(), inputs()[2]
    tokens = targets.clamp(min=0)
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = find_loss(model)({"tokens": tokens, "targets": targets})
    assert loss.item() == pytest.approx(factor * expected.item(), rel=1e-6)
    assert loss.requires_grad


class Moved(Logits):
    """A model that knows one more entry of a batch."""

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens + offsets)


def test_model_gets_the_entries_that_its_forward_names() -> None:
    model, (_, _, targets) = Moved(), inputs(ignored="none")
    tokens, offsets = targets.clamp(max=VOCAB - 2), torch.ones_like(targets)
    batch = {"tokens": tokens, "targets": targets, "offsets": offsets, "weights": torch.ones(3)}
    expected = cross_entropy(model(tokens, offsets), targets)
    assert (
        find_loss(model)(batch).item() == expected.item() != cross_entropy(model(tokens, 0 * offsets), targets).item()
    )


def test_logits_in_bf16_are_summed_in_fp32() -> None:
    logits = torch.randn(4, 600, VOCAB, dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (4, 600))
    loss = cross_entropy(logits, targets)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.dtype == torch.float32
    assert error(loss, expected) < 1e-6


def model_of(recipe: str, *overrides: str) -> nn.Module:
    config = load_config(recipe, [*tiny(*overrides)])
    with torch.device("meta"):
        model = config.spec.build_model(config.model)
    materialize(model, 0, torch.device("cpu"))
    return model


def test_losses_by_token() -> None:
    """From hidden states in chunks, and of a whole model: with gradients, each with its own weight."""
    generator = torch.Generator().manual_seed(0)
    model = model_of("llama_small", "model.vocab_size=263")
    tokens = torch.randint(0, 263, (3, 9), generator=generator)
    targets = torch.randint(0, 263, (3, 9), generator=generator)
    targets[0, :4] = targets[2, 5:] = IGNORE
    weights = torch.randn(3, 9, generator=generator)
    logprobs = token_logprobs(model, {"tokens": tokens, "targets": targets})
    (logprobs * weights).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    picked = model(tokens).log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = picked.where(targets != IGNORE, 0.0)
    (expected * weights).sum().backward()
    assert (logprobs - expected).abs().max() < 1e-5
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert (gradient - parameter.grad).abs().max() < 1e-5 * parameter.grad.abs().max() + 1e-6
    hidden, weight = torch.randn(3, 9, 8, generator=generator), torch.randn(263, 8, generator=generator)
    losses = linear_cross_entropy(hidden, weight, targets, chunk_bytes=2 * 4 * 263, reduction="token")
    of_tokens = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="none")
    assert (losses - of_tokens.view(3, 9)).abs().max() < 1e-5


def test_losses_by_token_of_a_model_that_sums_itself_are_refused() -> None:
    class Sums(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.one_hot(tokens, 5).float().flatten(0, 1), targets.flatten(), reduction="sum")

    batch = {"tokens": torch.zeros(2, 3, dtype=torch.int64), "targets": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(UserError, match="Sums"):
        token_logprobs(Sums(), batch)
    few = [item for item in tiny("model.balance=0.1", "model.expert_dim=8") if "ffn_dim" not in item]
    mixture = load_config("qwen3_moe_small", few)
    with pytest.raises(UserError, match=r"model\.balance=0"):
        token_logprobs(mixture.spec.build_model(mixture.model).train(), batch)
