"""``python -m dynmo_tools``: the command ``dynmo-prep``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
