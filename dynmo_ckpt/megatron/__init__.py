"""Megatron-LM's checkpoints and their relatives: weights, optimizer state, arguments and progress, read and written."""
