"""Token shards on a web server, in an object store, or anywhere else that fsspec can reach.

    transport   downloads bytes, with retries
    cache       a size-limited cache of shard files, shared by all ranks of a machine
    prefetch    downloads the next shards before they are needed
    shard       a shard that is read through the cache
    listing     finds the shards that a URL names
    text        downloads text files, from which shards are built

The samples and their order are the same as for local shards.
"""
