"""AdamW's moments in one byte each: their encoding, and runs that use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.launch import tiny
from trainer import Trainer, load_config
from trainer.optim.blockwise import MEAN, SQUARE, Code, block_length


def random_bits(shape: torch.Size, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 256), 256),
        ((4, 4096), 256),
        ((4, 192), 192),
        ((3, 5, 1000), 250),
        ((4, 257), None),
        ((300,), None),
        ((), None),
    ],
)
def test_block_is_part_of_one_row(shape: tuple[int, ...], expected: int | None) -> None:
    assert block_length(shape) == expected


@pytest.mark.parametrize("code", [MEAN, SQUARE], ids=["mean", "square"])
def test_rounding_is_exact_on_average(code: Code) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(16, 64, generator=generator) * torch.logspace(-2, 0, 64)
    values = values if code is MEAN else values.square()
    total = torch.zeros_like(values)
    for seed in range(300):
        codes, scales = code.encode(values, random_bits(values.shape, seed))
        assert codes.dtype == code.dtype
        total += code.decode(codes, scales)
    is_large = values.abs() > values.abs().amax(dim=1, keepdim=True) / 1000  # smaller squares are rounded up
    error = (total / 300 - values).abs() / values.abs()
    assert error[is_large].mean() < 0.02


def test_codes_survive_a_round_trip_and_zero_is_only_for_zero() -> None:
    for code, numbers in ((MEAN, torch.arange(-127, 128)), (SQUARE, torch.arange(256))):
        codes = numbers.to(code.dtype)[None]
        again, scales = code.encode(code.decode(codes, torch.ones(1)), random_bits(codes.shape))
        assert torch.equal(again, codes)
        assert scales.tolist() == [pytest.approx(1.0)]
    tiny = torch.tensor([[1.0, 1e-30, 0.0]])
    codes, scales = SQUARE.encode(tiny, torch.full((1, 3), 0x7FFF, dtype=torch.int32))
    assert codes.tolist() == [[255, 1, 0]]
    zeros, scales = MEAN.encode(torch.zeros(2, 4), random_bits(torch.Size([2, 4])))
    assert not zeros.any()
    assert not MEAN.decode(zeros, scales).any()


# ---------------------------------------------------------------------------------------------------------------
# Runs

SIZE = [
    "model.dim=48",
    "model.num_layers=2",
    "model.ffn_dim=80",
    "data.source=stdlib",
    "data.seq_len=32",
    "run.threads=1",
]


def settings(folder: Path, *more: str) -> list[str]:
    return tiny(*SIZE, "optim.state_dtype=int8", "train.steps=8", "optim.lr=0.01", f"run.dir={folder}", *more)


def losses_of(folder: Path, *more: str, save_at: int | None = None) -> list[float]:
    trainer = Trainer(load_config("llama_small", settings(folder, *more)))
    losses = []
    for record in trainer.steps():
        losses.append(record.loss)
        if record.step == save_at:
            trainer.save_checkpoint(wait=True)
            break
    trainer.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("way", [("float32", "int8"), ("int8", "float32"), ("int8", "bfloat16")])
def test_checkpoint_moves_between_dtypes(way: tuple[str, str], tmp_path: Path) -> None:
    before, after = way
    straight = losses_of(tmp_path / "straight", f"optim.state_dtype={before}")
    first = losses_of(tmp_path / "run", f"optim.state_dtype={before}", save_at=4)
    allowed = ["checkpoint.allow_changes=[optim.state_dtype]", f"optim.state_dtype={after}"]
    losses = first + losses_of(tmp_path / "run", *allowed)
    assert losses[:4] == straight[:4]
    assert max(abs(a - b) / b for a, b in zip(losses, straight, strict=True)) < 0.02
    trainer = Trainer(load_config("llama_small", settings(tmp_path / "run", *allowed)))
    trainer.load_checkpoint()
    state = trainer.optimizer.parts[0].state
    kinds = {str(value["exp_avg"].dtype).removeprefix("torch.") for p, value in state.items() if p.ndim == 2}
    assert kinds == {after}
    trainer.close()


@pytest.mark.slow
def test_checkpoint_is_smaller(tmp_path: Path) -> None:
    for dtype in ("float32", "int8"):
        losses_of(tmp_path / dtype, f"optim.state_dtype={dtype}", save_at=2)
    total = {
        dtype: sum(path.stat().st_size for path in (tmp_path / dtype / "checkpoints").rglob("*.distcp"))
        for dtype in ("float32", "int8")
    }
    assert total["int8"] < 0.75 * total["float32"], "4 + 2 bytes for most weights, where there were 4 + 8"
