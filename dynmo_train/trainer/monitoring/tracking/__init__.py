"""Weights & Biases and MLflow: scalars, configuration and events of a run, written by rank 0 from a thread."""
