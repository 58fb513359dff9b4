"""The configuration: one typed, frozen tree, and the rules for its values.

Recipe files override defaults, and the command line overrides both.  This package does not import torch, so `--help`
is fast, and a mistake in a setting is reported quickly.
"""
