"""Data pipeline: text -> tokens -> samples -> sample order -> micro-batches.

    tokenizer   text <-> token ids
    ingest      files of text or records -> token shards
    shards      token shards and manifests on disk; `remote` reads them from a URL
    source      samples by index, from token shards or synthetic patterns; `packing` masks and packs documents
    chat        conversations -> rows of tokens, with targets where the loss applies
    opening     data settings -> source
    mixture     the order of samples: maps each position to a sample, from one source or several
    loader      a rank's micro-batches, and the position from which a run resumes
    transfer    micro-batches -> device

Nothing here uses a device mesh or a model.  A rank is just an integer, and a model is represented only by its
vocabulary size and the tokenizer that came with its weights.  Only `loader` and `transfer` import torch, so that
mistakes in the data settings are reported early, before any process is spawned.
"""
