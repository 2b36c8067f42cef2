"""Starting a run's processes, and ending them together."""
