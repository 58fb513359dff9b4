"""The built-in objectives: each file has a dataclass, registered with `trainer.objective.register_objective`.

This folder is imported as `trainer.objectives`; an installed package contains it there.  An objective computes the
losses of samples; meshes, ranks, scaling and collectives are handled elsewhere.
"""
