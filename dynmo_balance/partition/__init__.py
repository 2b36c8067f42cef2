"""Partitioners: from a partitioning problem to stage boundaries."""
