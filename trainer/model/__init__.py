"""Prepares models for training: units, sharding, initialization, activation checkpointing, adapters."""
