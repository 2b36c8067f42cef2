"""Executes steps of a run again, and compares the digests of their tensors."""
