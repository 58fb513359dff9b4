"""The data: text becomes tokens, tokens become samples, samples come in an order, and the order is cut into batches.

    tokenizer   text <-> token ids
    source      samples by their index: the standard library's text, token shards on disk, generated patterns
    chat        conversations with what is trained on
    opening     settings -> source
    order       which sample comes at which position of an endless run
    loader      a rank's micro-batches, and the one number from which a run resumes

Knows no mesh and no model: a rank is a number among others here, and the model is the size of its vocabulary.  All
but `loader` work without torch, so that a mistake in the data settings is reported before anything is spawned.
"""
