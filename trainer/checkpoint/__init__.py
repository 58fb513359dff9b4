"""Checkpoints: save, publish, find, load and prune.

A checkpoint is a folder such as `step_00000100` that is published atomically: it is complete or it does not exist.
The modules, from the lowest layer up:

    storage         file systems and object stores, and how each publishes a folder atomically
    blocks          files whose checksums are computed while they are written
    state_tree      splits a state dict into tensors and JSON, without pickle
    chunk_table     offsets and sizes of a million chunks, as integer columns
    layout          which bytes of which file hold which part of a tensor
    writers         which rank writes a box that several ranks hold
    dcp             the uses of torch.distributed.checkpoint
    tensors         writing and reading sharded tensors
    small_files     writes small files and reads them back
    manifest        lists the files of a checkpoint and verifies them
    snapshot        the state at one moment, grouped by how it is stored
    retention       which checkpoints to keep
    compatibility   compares a checkpoint with the state that is to be restored from it
    reader          finds and restores checkpoints
    store           saves, publishes and prunes the checkpoints of a run
    interval        the save interval that loses the least time
    save_policy     the steps after which a save is due
    disk_space      warns if a run's checkpoints will not fit on the disk
    error_messages  merges the errors of all ranks into one message
    saver           the save in flight, and retries after failures
    stored_weights  reads weights from a checkpoint, in one process

This package sees `TrainState` only as a collection of objects with `state_dict` and `load_state_dict`, and imports no
model.
"""
