"""Ranks: the processes of a run, their devices and mesh, and what they tell each other."""
