"""Builds token shards from text, code, JSONL, JSON, CSV, parquet and Arrow files, and from other trainers' token files.

inputs      finds the files that match a path, folder or glob, opens them, and counts or rejects bad documents
readers     reads documents from these files, and tokens from other trainers' token files
encode      tokenizes documents, with a faster library if it gives the same ids, and splits long documents
build       splits the input into units, tokenizes each in one of several processes, and publishes the shards
progress    shows the progress of long operations on stderr
"""
