"""Inputs of the commands: profiles, run directories, model configurations, logs and traces."""
