"""Checkpoints: save, publish, find, load and prune.

A checkpoint is a folder such as `step_00000100` that is published atomically: it is complete or it does not exist.
Two layers over the storage:

    saver        when to save; retries; what happens before and after a save; which checkpoints are quarantined
    writer       makes one save: collects the state, plans, copies, writes, publishes and prunes
    reader       restores a state: finds checkpoints, compares them with the state, loads; reads weights by name

What they share, from the lowest module up:

    storage      file systems and object stores, how each publishes a folder atomically; files with checksums; errors
    manifest     lists the files of a checkpoint and verifies them
    retention    which checkpoints to keep, and whether they will fit on the disk
    interval     the save interval that loses the least time
    layout       which bytes of which file hold which part of a tensor, and which rank writes it
    state_parts  what a part of the state is; splits a state dict into tensors and JSON, without pickle
    dcp          the uses of torch.distributed.checkpoint

The first four of these do not import torch, so that commands that only list or plan start fast.  The package sees
`TrainState` only as a collection of objects with `state_dict` and `load_state_dict`, and imports no model.
"""
