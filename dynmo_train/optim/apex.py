"""Detects NVIDIA's apex and its fused optimizer and normalizations.

The package index has another project of that name, so ``apex.optimizers.FusedAdam`` decides. Fused normalizations
replace torch's, with the same parameters under the same names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

from torch import nn

State = Literal["present", "absent", "other"]


@dataclass(frozen=True, kw_only=True)
class Apex:
    """The apex of this environment.

    Attributes:
        state: ``present``, ``absent``, or ``other`` for a package of that name that is not NVIDIA's.
        fused_adam: ``apex.optimizers.FusedAdam``; None unless ``state`` is ``present``.
        fused_norms: torch's normalization -> class of ``apex.normalization``, as far as this apex has them.
    """

    state: State
    fused_adam: type[Any] | None = None
    fused_norms: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)

    def line(self, *, used: bool, optimizer: str | None = None) -> str:
        """Return a log line.

        Args:
            used: Whether this run uses apex's kernels.
            optimizer: Optimizer of a run that does not use AdamW, such as ``torch SGD``; None for AdamW.
        """
        fallback = optimizer or "torch's AdamW"
        if self.state == "absent":
            return f"apex: not installed (optional); using {fallback}"
        if self.state == "other":
            return (
                "apex: the installed package is not NVIDIA's (apex on the package index is another project);"
                f" using {fallback}"
            )
        names = [optimizer or "FusedAdam", *(fused.__name__ for fused in self.fused_norms.values())]
        listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        return f"apex: NVIDIA's; using {listed}" if used else f"apex: NVIDIA's, not used by this run; using {fallback}"


def find_apex(
    find: Callable[[str], object] = find_spec, load: Callable[[str], ModuleType] = importlib.import_module
) -> Apex:
    """Look for ``apex.optimizers.FusedAdam``; never raises, whatever a package of that name does on import."""
    if find("apex") is None:
        return Apex(state="absent")
    try:
        fused_adam = getattr(load("apex.optimizers"), "FusedAdam", None)
    except Exception:  # noqa: BLE001 - an unrelated package may fail in any way
        fused_adam = None
    if not isinstance(fused_adam, type):
        return Apex(state="other")
    return Apex(state="present", fused_adam=fused_adam, fused_norms=_fused_norms(load))


def _fused_norms(load: Callable[[str], ModuleType]) -> dict[type[nn.Module], type[nn.Module]]:
    """Return apex's fused normalizations; older versions lack FusedRMSNorm, and a build may lack both."""
    try:
        module = load("apex.normalization")
    except Exception:  # noqa: BLE001 - a build without the kernels may fail in any way
        return {}
    names: dict[type[nn.Module], str] = {nn.LayerNorm: "FusedLayerNorm", nn.RMSNorm: "FusedRMSNorm"}
    found = {plain: getattr(module, name, None) for plain, name in names.items()}
    return {plain: each for plain, each in found.items() if isinstance(each, type)}


def fuse_norms(module: nn.Module, fused: Mapping[type[nn.Module], type[nn.Module]]) -> nn.Module:
    """Replace torch's normalizations of an item by ``fused`` ones, in place; returns the item."""
    for path, child in list(module.named_modules()):
        # Subclasses too: ``models.norms.RmsNorm``.
        kind = next((other for plain, other in fused.items() if isinstance(child, plain)), None)
        if kind is None or not isinstance(child, nn.LayerNorm | nn.RMSNorm):
            continue
        other = kind(child.normalized_shape, eps=child.eps)
        other._parameters.update(child._parameters)
        if not path:
            return other
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, other)
    return module
