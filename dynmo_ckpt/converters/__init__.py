"""Checkpoint formats: one module per format, with how to recognize, read and write it; and the registry of them."""
