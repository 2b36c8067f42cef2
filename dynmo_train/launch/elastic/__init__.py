"""Who takes part in a run: membership, restarts, and continuation and growth in place."""
