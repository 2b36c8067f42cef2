"""Hangs: heartbeats of ranks, and what a rank waited for."""
