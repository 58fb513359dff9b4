"""The model as it is trained: units, sharding, initial weights, activation checkpointing, parameters."""
