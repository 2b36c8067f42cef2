"""Runs steps: task manifest, tasks with markers, worker pools, Ray, Slurm, recipes, resume."""
