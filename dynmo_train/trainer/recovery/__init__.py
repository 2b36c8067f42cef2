"""Continues a training after the loss of a rank, from copies of the state in the memory of other ranks."""
