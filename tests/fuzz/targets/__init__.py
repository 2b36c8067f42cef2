"""The registry: all fuzz targets, one module per package."""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.target import Collected, Target

PACKAGE_MODULES = ("balance", "ckpt", "tools", "train")


def load_targets(module: str = __name__) -> dict[str, Target]:
    """All targets by name; another module of the same form registers its own in ``TARGETS``."""
    if module != __name__:
        return dict(import_module(module).TARGETS)
    collected = Collected()
    for name in PACKAGE_MODULES:
        collected.add(*import_module(f"{__name__}.{name}").TARGETS)
    return dict(sorted(collected.targets.items()))
