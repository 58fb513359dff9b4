"""The built-in objectives: each file defines a dataclass and registers it with `register_objective`.

This folder is imported as `trainer.objectives`, which is also where an installed package has it.  An objective only
computes the loss of each sample or token; meshes, ranks, scaling and collectives are handled elsewhere.
"""
