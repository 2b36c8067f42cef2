"""Attention by all its means, positions, and documents and padding in a sample."""
