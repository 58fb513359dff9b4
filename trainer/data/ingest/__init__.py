"""Builds token shards from text, code, JSONL and parquet, compressed or not.

    inputs      the files that a path means
    units       pieces of the input that no number of processes changes; each becomes a shard
    text        documents out of files of text and JSONL
    records     documents out of parquet and Arrow files
    engines     documents to ids, fast where the ids are those of the tokenizer's own library
    cutting     long documents in pieces whose ids are those of the whole
    writing     one unit: from its documents to its shards
    folder      the folder where it happens: locks, what is done, the manifest
    builder     takes units until none is left

Any number of processes, on any machines that share the folder, may build in it at once, begin late or be killed: who
takes which unit is decided by locks that the kernel gives back.
"""
