"""Tensors as strided windows on stored bytes: views, copy plans, and the copy itself."""
