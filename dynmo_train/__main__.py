"""``python -m dynmo_train``: the form in which ``launch`` starts its workers."""

from __future__ import annotations

from .cli import main

main()
