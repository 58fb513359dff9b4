"""The built-in objectives: each is a file with a dataclass that `trainer.objective.register_objective` registers.

This folder is imported as `trainer.objectives`; an installed package contains it there.  An objective sees numbers of
samples, and no mesh, rank, scale or collective.
"""
