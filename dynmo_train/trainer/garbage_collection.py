"""Cyclic garbage collection: rare while modules are imported, and never over what they made.

Imports of torch make 300,000 objects that stay. Python's collector scans young objects after every 700 new ones, and
those that survive again and again: 0.4 of the 2.5 s of processor time in which a rank starts. In training each
complete collection would scan the modules once more: 0.11 s at moments that differ between ranks.
"""

from __future__ import annotations

import gc

_DEFAULTS = gc.get_threshold()
_WHILE_IMPORTING = (50_000, 20, 100)


def collect_rarely() -> None:
    """Raise the thresholds for the start of a process."""
    gc.set_threshold(*_WHILE_IMPORTING)


def freeze_imports() -> None:
    """Exclude all objects so far from collections, and restore the default thresholds: once imports are done."""
    gc.freeze()
    gc.set_threshold(*_DEFAULTS)
