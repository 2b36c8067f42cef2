"""What the commands read: profiles, run directories, model configurations, logs and traces of other programs."""
