"""The built-in objectives, except `tokens`.

Each file defines an objective as a dataclass and registers it with `register_objective`.  An objective computes the
loss of each sample, the metrics to log and, if needed, a value per sample whose mean over the batch enters the loss;
`distill` instead computes the divergence at each token.  Meshes, ranks, collectives and the scaling of the loss are
handled elsewhere.

This folder is imported as `trainer.objectives`; in an installed package, it is at trainer/objectives.
"""
