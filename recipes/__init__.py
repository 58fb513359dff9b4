"""The built-in models: each consists of a plain torch module, a dataclass, and a call of `register(Recipe(...))`.

Apart from the lists of FSDP units, this code is independent of meshes, ranks and sharding.
"""
