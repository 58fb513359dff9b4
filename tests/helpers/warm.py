"""Fills caches once, in the fork server, so that forked processes find them filled.

It reads a configuration, lists the files of the standard library and plans a step. This fills the caches of structured
configurations, of files, of operators on fake tensors, and of the planner's probes.
"""

from __future__ import annotations

import torch

from tests.helpers.launch import tiny
from trainer import load_config
from trainer.config.parallel import MeshShape
from trainer.data.opening import open_source
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

# The first backward pass in a process starts one thread per device, after which the process cannot be forked.  Here it
# finds no device; later, fake tensors would make a CUDA build of torch count one.
torch.ones(1, requires_grad=True).sum().backward()
for overrides in ([], ["train.micro_batch_size=1"]):
    config = load_config("llama_small", tiny(*overrides))
    open_source(config.data, config.model.vocab_size, "train")
    make_plan(config, MeshShape(1, 1), find_machine("cpu"))
