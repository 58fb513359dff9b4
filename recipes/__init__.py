"""The built-in models: each has a plain torch module, a configuration dataclass, and a call to `register(Recipe(...))`.

This folder is imported as `trainer.recipes`, which is also where an installed package has it.  Apart from the lists of
FSDP units, the code does not depend on meshes, ranks or sharding.
"""
