"""Name maps as data: one JSON table a foreign format, read in both directions."""
