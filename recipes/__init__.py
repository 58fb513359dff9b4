"""The built-in models.

Each subfolder defines a configuration dataclass and registers one `ModelSpec`.  Each of
these subfolders except `hf` also defines the model, as a plain torch module.  Apart from the FSDP units
(`ModelSpec.units`), the code does not depend on meshes, ranks or sharding.

This folder is imported as `trainer.recipes`; in an installed package, it is at trainer/recipes.
"""
