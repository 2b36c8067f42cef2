"""Whether NVIDIA's apex is here: the package index has another project of that name, so its optimizers decide."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

State = Literal["present", "absent", "other"]


@dataclass(frozen=True, kw_only=True)
class Apex:
    """What was found; ``fused_adam`` is ``apex.optimizers.FusedAdam``, None unless ``state`` is ``present``."""

    state: State
    fused_adam: type[Any] | None = None

    def line(self, *, used: bool) -> str:
        """One line for the start of a log; ``used`` says whether this run's optimizer is apex's."""
        if self.state == "absent":
            return "apex: not installed, and not needed: torch's AdamW is used"
        if self.state == "other":
            return (
                "apex: what is installed is not NVIDIA's (the apex on the package index is another project):"
                " torch's AdamW is used"
            )
        return f"apex: NVIDIA's, {'its FusedAdam is used' if used else 'not used by this run: torch AdamW is'}"


def find_apex(
    find: Callable[[str], object] = find_spec, load: Callable[[str], ModuleType] = importlib.import_module
) -> Apex:
    """Look for ``apex.optimizers.FusedAdam``; never raises, whatever a package of that name does when it is loaded."""
    if find("apex") is None:
        return Apex(state="absent")
    try:
        fused_adam = getattr(load("apex.optimizers"), "FusedAdam", None)
    except Exception:  # noqa: BLE001 - a stranger's package may fail in any way
        fused_adam = None
    if not isinstance(fused_adam, type):
        return Apex(state="other")
    return Apex(state="present", fused_adam=fused_adam)
