"""``dynmo-train explain-flags``: translate the flags of published scripts."""
