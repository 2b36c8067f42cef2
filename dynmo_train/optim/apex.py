"""Whether NVIDIA's apex is here: the package index has another project of that name, so its optimizers decide.

Its fused normalisations take the place of torch's, with the same parameters under the same names.
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
    """What was found.

    Attributes:
        fused_adam: ``apex.optimizers.FusedAdam``; None unless ``state`` is ``present``.
        fused_norms: torch's normalisation -> apex's of ``apex.normalization``, of those that it has.
    """

    state: State
    fused_adam: type[Any] | None = None
    fused_norms: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)

    def line(self, *, used: bool) -> str:
        """One line for the start of a log; ``used`` says whether this run's optimizer and norms are apex's."""
        if self.state == "absent":
            return "apex: not installed, and not needed: torch's AdamW is used"
        if self.state == "other":
            return (
                "apex: what is installed is not NVIDIA's (the apex on the package index is another project):"
                " torch's AdamW is used"
            )
        names = ["FusedAdam", *(fused.__name__ for fused in self.fused_norms.values())]
        told = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        ours = f"its {told} {'are' if len(names) > 1 else 'is'} used"
        return f"apex: NVIDIA's, {ours if used else 'not used by this run: torch AdamW is'}"


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
    return Apex(state="present", fused_adam=fused_adam, fused_norms=_fused_norms(load))


def _fused_norms(load: Callable[[str], ModuleType]) -> dict[type[nn.Module], type[nn.Module]]:
    """The fused normalisations of this apex; older ones have the first alone, and a build may have left them out."""
    try:
        module = load("apex.normalization")
    except Exception:  # noqa: BLE001 - a build without the kernels may fail in any way
        return {}
    wanted: dict[type[nn.Module], str] = {nn.LayerNorm: "FusedLayerNorm", nn.RMSNorm: "FusedRMSNorm"}
    found = {plain: getattr(module, name, None) for plain, name in wanted.items()}
    return {plain: each for plain, each in found.items() if isinstance(each, type)}


def fuse_norms(module: nn.Module, fused: Mapping[type[nn.Module], type[nn.Module]]) -> nn.Module:
    """Put ``fused`` in the place of torch's normalisations, in place, with their own parameters; returns the item."""
    for path, child in list(module.named_modules()):
        kind = fused.get(type(child))
        if kind is None or not isinstance(child, nn.LayerNorm | nn.RMSNorm):
            continue
        other = kind(child.normalized_shape, eps=child.eps)
        other._parameters.update(child._parameters)
        if not path:
            return other
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, other)
    return module
