"""The model families, and the base class of them all."""
