"""Compression of gradients: at stage boundaries, and between replicas."""
