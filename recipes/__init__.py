"""The built-in models.

Each subfolder except `dpo`, an old import path, defines a configuration dataclass and registers one `Recipe`.  Each of
these subfolders except `hf` also defines the model, as a plain torch module.  Apart from the FSDP units
(`Recipe.units`), the code does not depend on meshes, ranks or sharding.

This folder is imported as `trainer.recipes`; in an installed package, it is at trainer/recipes.
"""
