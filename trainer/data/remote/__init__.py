"""Token shards on a web server, in an object store, or anywhere else that fsspec can reach.

    transport   downloads files, with retries
    cache       a size-limited cache of shard files, shared by all ranks of a machine
    shards      finds the shards that a URL names, reads them through the cache, and prefetches the next ones
    text        downloads text files, from which shards are built

The samples and their order are the same as for local shards.
"""
