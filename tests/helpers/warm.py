"""Fills caches once, in the fork server, so that forked runs find them filled.

It reads a configuration, lists the files of the standard library and plans a step. This fills the caches of structured
configurations, of files, of operators on fake tensors, and of probes.
"""

from __future__ import annotations

import torch

from tests.helpers.probes import cache_probes, plan_with_cached_probe
from tests.helpers.ranks import tiny_overrides
from trainer import load_config
from trainer.config import MeshShape
from trainer.data.stdlib import StdlibCorpus
from trainer.plan.machine import find_machine
from trainer.plan.plan import without_data

# The first backward pass in a process starts one thread per device, after which the process cannot be forked.  Here it
# finds no device; later, fake tensors would make a CUDA build of torch count one.
torch.ones(1, requires_grad=True).sum().backward()
cache_probes()
StdlibCorpus()
for size in (1, 2):
    tiny = load_config("llama_small", tiny_overrides(f"train.micro_batch_size={size}"))
    plan_with_cached_probe(without_data(tiny), MeshShape(1, 1), find_machine("cpu"))
