"""Benchmarks that support the project's claims about speed and memory."""
