"""Token shards and text on a web server, in an object store, on the Hub, or anywhere else that fsspec can reach.

    transport   lists, reads and downloads files, with retries
    cache       caches remote files for all processes on a machine, up to a size limit
    shards      finds the shards that a URL names, reads them through the cache, and prefetches the next ones
    text        finds and downloads text files, from which shards are built
    datasets    finds and fetches the files of datasets on the Hugging Face Hub

The samples and their order are the same as for local files.
"""
