"""Weights by name: read, filled in, imported from and exported to other formats."""
