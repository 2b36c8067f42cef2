"""Layers of every model: prunable products and their sparse forms, MLPs, norms, gates."""
