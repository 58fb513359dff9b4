"""The built-in models: each consists of a plain torch module, a dataclass, and a call of `register(Recipe(...))`.

This folder is imported as `trainer.recipes`; an installed package contains it there.  Apart from the lists of FSDP
units, the code does not depend on meshes, ranks or sharding.
"""
