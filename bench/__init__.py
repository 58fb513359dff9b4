"""Benchmarks: what the claims about speed and memory rest on."""
