"""Costs of items: measured, analytic and pruned; devices and model shapes."""
