"""Data pipeline: text -> tokens -> samples -> sample order -> micro-batches.

    records     files -> records; `token_files` reads tokens of other trainers
    remote      files at a URL -> local files; `hub_data`: those of a dataset on the Hugging Face Hub
    tokenizer   text <-> token ids
    text        records -> the documents and ids of token shards; `stdlib` has documents that need no download
    chat        conversations -> the same, with targets where the loss applies
    build       builds shards piece by piece, once for all processes; `cache` does so for single entries
    shards      token shards and manifests on disk, and several shards as one stream of tokens
    source      samples by index, from token shards or synthetic patterns; `packing` masks and packs documents
    opening     data settings -> source
    mixture     the order of samples: maps each position to a sample, from one source or several
    loader      a rank's micro-batches, and the position from which a run resumes
    transfer    micro-batches -> device

Nothing here uses a device mesh or a model.  A rank is just an integer, and a model is represented only by its
vocabulary size and the tokenizer that came with its weights.  Only `loader` and `transfer` import torch, so that
mistakes in the data settings are reported early, before any process is spawned.
"""
