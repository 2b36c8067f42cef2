"""Independent verification of a plan: every number recomputed without the solvers."""
