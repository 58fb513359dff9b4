"""The built-in objectives, except `tokens`: each file defines a dataclass and registers it with `register_objective`.

An objective only computes the loss of each sample, or the divergence at each token; meshes, ranks, scaling and
collectives are handled elsewhere.  This folder is imported as `trainer.objectives`, and an installed package contains
it under that name.
"""
