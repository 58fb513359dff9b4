"""Data pipeline: text -> tokens -> samples -> an order of samples -> micro-batches.

    tokenizer        text <-> token ids
    source           samples by index: token shards on disk, standard library text, synthetic patterns
    chat             conversations and their loss masks
    opening          data settings -> source
    mixture          which sample is at each position of an endless run
    loader           a rank's micro-batches, and the sample count that a resume needs

Nothing here depends on the mesh or the model: a rank is just an integer, and of the model only the vocabulary size
matters.  Most modules work without torch, so that a mistake in the data settings is reported before any process is
spawned.
"""
