"""Settings of the steps, each declared once: flag, recipe key and help follow from it."""
