"""The models that come with the trainer: each a plain torch module, a dataclass, and a `register(Recipe(...))`.

Nothing here knows of meshes, ranks or sharding beyond the list of units.
"""
