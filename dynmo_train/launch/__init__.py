"""Start, supervise and restart the processes of a run."""
