"""Logs, profiles and comparisons of runs."""
