"""Containers and directories: where bytes lie, how they are put in place. Nothing here knows what a tensor means."""
