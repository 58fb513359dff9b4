"""The former location of the Trainer for `train.objective=dpo`, which is now `trainer.objective_trainer`."""
