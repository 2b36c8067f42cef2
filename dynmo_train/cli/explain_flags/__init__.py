"""``explain-flags``: what the flags of published scripts mean here."""
