"""The training loop, the engine that runs one optimizer step, and what a run sets up, logs and saves."""
