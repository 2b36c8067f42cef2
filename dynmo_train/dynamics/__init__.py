"""Dynamic techniques that act between steps: one file each; ``technique.py`` has the lifecycle and its hooks."""
