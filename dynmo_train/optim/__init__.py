"""Optimizers of single items, the learning rate over time, gradient norms, tied weights."""
