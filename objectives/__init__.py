"""The built-in objectives, except `tokens`: each file defines a dataclass and registers it with `register_objective`.

An objective computes the loss of each sample, a statistic that the loss may need, and metrics; or the divergence at
each token.  Meshes, ranks, the scaling of the loss and collectives are handled elsewhere.

This folder is imported as `trainer.objectives`, and an installed package contains it under that name.
"""
