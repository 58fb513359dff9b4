"""Loads weights into models from our checkpoints and from other formats, and exports weights to other formats."""
