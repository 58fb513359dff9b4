"""Former location of the Trainer for `train.objective=dpo`, which has moved to `trainer.objective_trainer`."""
