"""Recipes: the assumptions and the predicted speed-up of each dynamic technique."""
