"""The built-in objectives: each is a file with a dataclass that `trainer.objective.register_objective` registers.

This folder is imported as `trainer.objectives`; an installed package contains it there.  An objective computes the
losses of samples; meshes, ranks, scaling and collectives are handled elsewhere.
"""
