"""Settings of every step, declared once, and their flags, recipe keys and help."""
