"""Saves, publishes, finds, loads and prunes checkpoints.

A checkpoint is a folder such as `step_00000100` that is published atomically: it is complete or it does not exist.

    saver        decides when to save, retries failed saves, quarantines suspect checkpoints
    writer       performs one save: collects the state, plans, copies, writes, publishes and prunes
    reader       finds checkpoints, compares them with the state, restores one; also reads weights by name

These three use the modules below, lowest first:

    storage      file systems and object stores, each with its own way to publish atomically; files with checksums
    manifest     the names of checkpoints; the list of a checkpoint's files, used to verify them
    retention    which checkpoints to keep, and whether they will fit on the disk
    interval     the save interval that loses the least time
    layout       where the bytes of each tensor are in the files; which rank writes and reads them
    state_parts  the interface for a part of the state; splits a state dict into tensors and JSON, without pickle; the
                 files for state that is not in the data files

The first four of these do not import torch, because `trainer.runs`, `trainer.sweep` and `trainer.report`, which use
`storage` and `interval`, start without it.  The package accesses the parts of a `TrainState` only through the interface
in `state_parts`, and does not depend on any particular model.

The command that lists and compares checkpoints, `python -m trainer.checkpoints`, is in `trainer/checkpoints.py`.
"""
