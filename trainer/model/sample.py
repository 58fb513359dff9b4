"""Text that a model writes: enough to see what it has learnt; no serving engine."""

from __future__ import annotations

import torch
from torch import nn

from trainer.distributed.world import World


@torch.no_grad()
def write_sample(
    model: nn.Module, world: World, prompt: list[int], num_tokens: int, context: int, temperature: float = 0.8
) -> list[int]:
    """Return `prompt` followed by `num_tokens` that the model chose.

    All ranks call it: each forward gathers a sharded model.  Rank 0 draws, and the others learn what it drew.
    The shape of every forward is (1, context), so that a compiled model is not compiled again.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-context:]
        padded = torch.tensor([window + [0] * (context - len(window))], device=world.device)
        logits_V = model(padded)[0, len(window) - 1].float().cpu()
        drawn = torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator)
        tokens.append(int(world.broadcast(int(drawn))))
    return tokens
