"""Builds token shards from text, code, JSONL and parquet files, compressed or not.

    inputs      finds the files that a path, folder or glob names, opens them, and counts or rejects bad documents
    documents   reads documents from text, JSONL, parquet and Arrow files, and the token files of other trainers
    encode      tokenizes documents, with a faster library if it gives the same ids, and splits long ones
    build       splits the input into units, tokenizes each in one of several processes, and publishes the shards
    progress    shows the progress on stderr

Any number of processes, on any machines that share the folder, can build in it at the same time, join late, or be
killed.  File locks decide which process builds which unit; the kernel releases those of a process that dies.
"""
