"""``python -m dynmo_balance`` is ``dynmo-plan``."""

from .cli import main

main()
