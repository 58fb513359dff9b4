"""Data pipeline: text -> tokens -> samples -> sample order -> micro-batches.

    tokenizer   text <-> token ids
    ingest      text, JSONL and parquet files -> token shards
    shards      token shards and manifests on disk; `remote` reads them from a URL
    source      samples by index, from token shards or synthetic patterns; `packing` for masked and packed documents
    chat        conversations -> rows of tokens and targets with a loss mask
    opening     data settings -> source
    mixture     the order of samples: maps each position to a sample, from one source or several
    loader      a rank's micro-batches, and the position from which a run resumes
    transfer    micro-batches to the device

Nothing here uses a device mesh or a model: a rank is an integer, and the only property of the model that matters is its
vocabulary size.  Most modules do not import torch, so that mistakes in the data settings are reported before any
process is spawned.
"""
