"""Save and load checkpoints of the engine."""
