"""Initial weights: the same on any mesh, bit for bit, whatever an initialization does and whichever part a rank keeps.

How modules without values are filled is in `test_sharding.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.launch import on_ranks
from tests.helpers.tiny import full, tiny_config
from trainer import ModelSpec, Trainer, load_config, register


@dataclass(frozen=True)
class OwnConfig:
    vocab_size: int = 257


class Layer(nn.Module):
    """Two matrices and a bias."""

    rows = 400

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.empty(self.rows, 256)), nn.Parameter(torch.empty(400, 256))
        self.bias = nn.Parameter(torch.empty(400))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean() + self.other.mean() + self.bias.mean()


class DrawsOneAfterAnother(Layer):
    rows = 2**15
    """So many that no rank need draw all of it."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.kaiming_uniform_(self.other)
        nn.init.normal_(self.weight, mean=1.0)
        nn.init.uniform_(self.bias, 1.0, 2.0)


class ChangesWhatWasDrawn(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(0.5).clamp_(0, 1)
        self.other.uniform_(-1, 1)
        self.other.data[2].zero_()
        self.bias.copy_(torch.rand(len(self.bias)) + self.other.sum())


class ReadsWithoutAnOperator(Layer):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_()
        self.weight.data.numpy()[3] = 0.0
        self.other.data.numpy()[:] = 1.0
        self.bias.fill_(float(self.weight.detach().numpy().sum()))


class Own(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, 256)
        self.layers = nn.ModuleList(
            kind() for kind in (DrawsOneAfterAnother, ChangesWhatWasDrawn, ReadsWithoutAnOperator)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.table.weight.T


register(ModelSpec("draws", OwnConfig, Own, ["table", "layers.*"]))


def digests(folder: Path, *overrides: str) -> dict[str, tuple[float, float, bool]]:
    """Return for each parameter of both models what tells whether a bit differs, without sending it to the test."""
    own = [f"model.name={Own.__module__}:draws", "data.source=synthetic", "data.seq_len=8", "run.device=cpu"]
    own += ["train.global_batch_size=12", "train.micro_batch_size=2", "run.threads=1", f"run.dir={folder / 'run'}"]
    found = {}
    for config in (
        tiny_config(folder / "run", "train.global_batch_size=12", *overrides),
        load_config("llama_small", [*own, *overrides]),
    ):
        trainer = Trainer(config)
        for name, parameter in trainer.model.named_parameters():
            bits = full(parameter.detach()).contiguous().view(torch.int32).flatten().to(torch.int64)
            weighted = (bits * (1 + torch.arange(bits.numel()) % 65_521)).sum()
            found[f"{config.spec.name} {name}"] = (int(bits.sum()), int(weighted), bool(bits.any()))
        trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_ranks_that_keep_only_their_part_have_the_weights_of_one_rank(ranks: int, tmp_path: Path) -> None:
    """Two ranks divide the table unevenly, and three divide no dimension evenly."""
    alone = digests(tmp_path)
    for found in on_ranks(ranks, digests, tmp_path):
        assert found == alone
    assert all(is_filled for _, _, is_filled in alone.values())
