"""Partitioners: from a problem to stage boundaries."""
