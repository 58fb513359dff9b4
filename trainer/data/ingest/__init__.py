"""Builds token shards from text, code, JSONL and parquet files, compressed or not.

    inputs      finds the input files that a path, folder or glob names
    units       splits the input into units, independently of the number of processes; each becomes a shard
    text        reads documents from text and JSONL files
    records     reads documents from parquet and Arrow files
    engines     tokenizes documents, with a faster library if it gives the same ids
    splitting   splits long documents without changing their ids
    writing     tokenizes one unit and writes its shards
    folder      manages the build folder: locks, records of finished units, the manifest
    builder     builds the units that remain

Any number of processes, on any machines that share the folder, can build in it at the same time, join late, or be
killed.  File locks decide which process builds which unit; the kernel releases those of a process that dies.
"""
