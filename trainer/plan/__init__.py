"""Memory, communication and time of a run, known before it starts."""
