"""``dynmo-train doctor``: what is installed, what is missing and what that costs, and how fast the links are."""
