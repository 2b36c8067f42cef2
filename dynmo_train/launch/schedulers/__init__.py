"""Starting a run on several machines: over ssh, and by the schedulers of clusters."""
