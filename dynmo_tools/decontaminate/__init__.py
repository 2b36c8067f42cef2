"""Removes n-grams of downstream tasks from documents."""
