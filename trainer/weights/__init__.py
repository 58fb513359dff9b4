"""Loads weights into models, and imports and exports other formats."""
