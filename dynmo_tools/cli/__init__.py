"""The command line of ``dynmo-prep``."""

from __future__ import annotations

from .commands import app, main

__all__ = ["app", "main"]
