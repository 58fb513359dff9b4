"""A training loop of your own: FSDP2, with checkpoints that are verified when read and published atomically.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py

Each start resumes from the newest checkpoint in runs/own_loop, on any number of processes, and trains 20 more steps.
docs/own_checkpoints.md explains the calls.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint import CheckedWriter, VerifiedReader

FOLDER = Path("runs/own_loop")

if "RANK" not in os.environ:  # not started by torchrun: one process
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
saving_group = dist.new_group(backend="gloo")  # saves run in a thread, which must not share a group with training

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
for unit in (model[0], model[2], model):
    fully_shard(unit, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state_at(step):
    """Return everything that a resume needs, with the tensors that training changes: loading fills them in place."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


state, saving = state_at(0), None
if newest := max(FOLDER.glob("step_*"), default=None):
    dcp.load(state, storage_reader=VerifiedReader(newest))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

for step in range(state["step"] + 1, state["step"] + 21):
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    inputs = batch.chunk(mesh.size())[mesh.get_rank()]
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}, rank {mesh.get_rank()}: loss {loss.item():.6f}")
    if step % 5 == 0:
        if saving is not None:
            saving.result()  # one save at a time; this raises its error
        writer = CheckedWriter(FOLDER / f"step_{step:08}")
        saving = dcp.async_save(state_at(step), storage_writer=writer, process_group=saving_group)
saving.result()
dist.destroy_process_group()
