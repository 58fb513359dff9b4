"""Checkpoints: save, publish, find, load, prune.

A checkpoint is a folder `step_00000100` that exists whole or not at all.  From the ground up:

    place       where it lies: a file system or an object store; how something comes to be there at once
    blocks      files with checksums that are taken while they are written
    tree        state without pickle: tensors one way, the rest as JSON
    columns     what is known of a million chunks, as integers
    layout      which bytes of which file hold what of a tensor
    writers     who writes what, where several ranks hold the same
    dcp         what is on this rank and which chunks it reads, as torch.distributed.checkpoint has it
    tensors     sharded tensors in files
    manifest    what a checkpoint consists of, and whether that is what is there
    store       the checkpoints of a run: save, publish, prune, find, load
    schedule    when to save, and when again after a failure
    source      a checkpoint to read weights from, in one process

Knows `TrainState` only as what it is made of (things with state_dict and load_state_dict), and no model.
"""
