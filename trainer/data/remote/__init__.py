"""Token shards that are elsewhere: on a web server, in an object store, wherever fsspec reaches.

    transport   bytes from there; what is lost on the way is asked for again
    cache       whole files of shards on this machine, shared by its ranks, within a bound
    coming      which shards are needed next, fetched before they are
    shard       a shard that is read through the cache
    listing     the shards that a URL means
    text        text that shards are made of here

The samples and their order are those of the same shards on a disk.
"""
