"""Checkpoints: save, publish, find, load, prune.

A checkpoint is a folder `step_00000100` that exists whole or not at all: it is written under a temporary name, flushed
to disk and renamed.  In it:

    .metadata, *.distcp     every tensor, sharded, in the format of torch.distributed.checkpoint
    state.json              what is small and the same on all ranks: step, position in the data, counters
    ranks/rank_00000.pt     what is a rank's own: its random states
    config.yaml             the configuration of the run that wrote it

Knows `TrainState` only as what it is made of (things with state_dict and load_state_dict), and no model.
"""
