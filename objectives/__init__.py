"""The built-in objectives, except `tokens`.

Each file defines an objective as a dataclass and registers it with `register_objective`.  An objective computes the
loss of each sample, the metrics to log and, if the loss needs one, a statistic; `distill` instead computes the
divergence at each token.  Meshes, ranks, the scaling of the loss and collectives are handled elsewhere.

This folder is imported as `trainer.objectives`, and an installed package contains it under that name.
"""
