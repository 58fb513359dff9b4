"""Direct preference optimisation: a Trainer for `train.objective=dpo`, with any model."""
