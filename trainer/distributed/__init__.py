"""Ranks: the processes of a run, their devices and mesh, and the messages between them."""
