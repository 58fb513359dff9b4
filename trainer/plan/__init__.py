"""Predicts the memory, communication and time of a run before it starts."""
