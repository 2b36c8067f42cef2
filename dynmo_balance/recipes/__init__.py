"""Recipes: the assumptions and the predicted gain of each dynamic technique."""
