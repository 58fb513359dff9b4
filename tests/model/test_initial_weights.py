"""Initial weights if each rank draws only its own part: the values equal those of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers.launch import on_ranks, tiny
from tests.helpers.tiny import full
from tests.model.test_sharding import open_group
from trainer import Trainer, UserError, load_config
from trainer.model import materialize

ROWS, COLUMNS = 40, 60


class Layer(nn.Module):
    """Two matrices and a bias, filled by `init`."""

    def __init__(self, init: Callable[[Layer], None]) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.empty(ROWS, COLUMNS)) for _ in range(2))
        self.bias = nn.Parameter(torch.empty(ROWS))
        self.init = init

    def reset_parameters(self) -> None:
        self.init(self)


@torch.no_grad()
def reads_without_an_operator(layer: Layer) -> None:
    layer.weight.normal_()
    layer.weight.data.numpy()[3] = 0.0
    layer.other.data.numpy()[:] = 1.0
    layer.bias.fill_(float(layer.weight.detach().numpy().sum()))


@torch.no_grad()
def changes_what_was_drawn(layer: Layer) -> None:
    layer.weight.normal_(0.5).clamp_(0, 1)
    layer.other.uniform_(-1, 1)
    layer.other.data[2].zero_()
    layer.bias.copy_(torch.rand(ROWS) + layer.other.sum())


def draws_one_after_another(layer: Layer) -> None:
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.kaiming_uniform_(layer.other)
    nn.init.normal_(layer.weight, mean=1.0)
    nn.init.uniform_(layer.bias, 1.0, 2.0)


def leaves_the_first_to_chance(layer: Layer) -> None:
    nn.init.trunc_normal_(layer.other)
    nn.init.zeros_(layer.bias)
    layer.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))


INITS = [draws_one_after_another, changes_what_was_drawn, reads_without_an_operator, leaves_the_first_to_chance]


def part_of(init: Callable[[Layer], None], rows: slice, seed: int = 7) -> dict[str, torch.Tensor]:
    """Return the part of each tensor that a rank with these rows keeps."""
    layer, kept = Layer(init), {}
    layer.to("meta")

    def keep(parameter: torch.Tensor, whole: torch.Tensor, drawn: materialize.DeferredFill | None = None) -> None:
        name = next(
            name for name, tensor in layer.named_parameters() if tensor.shape == whole.shape and name not in kept
        )
        if drawn is None:
            kept[name] = whole[rows].clone()
        else:
            kept[name] = drawn.draw(rows.start * COLUMNS, rows.stop * COLUMNS).view(-1, COLUMNS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialize, "_copy_shard", keep)
        patch.setattr(
            materialize,
            "local_box",
            lambda parameter: ((rows.start, rows.stop), *((0, n) for n in parameter.shape[1:])),
        )
        materialize.materialize(layer, seed, torch.device("cpu"))
    return kept


@pytest.mark.parametrize("init", INITS)
def test_drawn_part_equals_that_of_the_whole_for_any_init(
    init: Callable[[Layer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = part_of(init, slice(0, ROWS))
    monkeypatch.setattr(materialize, "MIN_ELEMENTS", 1)
    for rows in (slice(0, 13), slice(13, 26), slice(39, 40), slice(40, 40)):
        for name, part in part_of(init, rows).items():
            assert torch.equal(part, whole[name][rows]), (name, rows)


def fills_two_of_three(layer: Layer) -> None:
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)


def test_unfilled_elements_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "MIN_ELEMENTS", 1)
    with pytest.raises(UserError, match=r"uninitialized: other:"):
        part_of(fills_two_of_three, slice(0, 5))


def weights_drawn(least: list[int]) -> list[list[torch.Tensor]]:
    """Return the full weights of a model for each minimum size from which on only parts are drawn."""
    open_group()
    found = []
    for materialize.MIN_ELEMENTS in least:
        trainer = Trainer(load_config("llama_small", tiny("data.source=synthetic", "train.global_batch_size=6")))
        found.append([full(parameter) for parameter in trainer.model.parameters()])
        trainer.close()
    return found


@pytest.mark.slow
def test_ranks_that_draw_only_their_part_have_the_same_weights() -> None:
    for whole, parts in on_ranks(3, weights_drawn, [2**40, 1]):
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one, other)
