"""Compression of what processes send each other: gradients at stage boundaries, and gradients of replicas."""
