"""Runs steps: task manifest, tasks and markers, worker pool, Ray, Slurm, recipes, resume."""
