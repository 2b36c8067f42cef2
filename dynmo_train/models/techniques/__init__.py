"""Techniques that change what a model computes for a token: exits, and depths."""
