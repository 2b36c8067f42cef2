"""Options of an emulated run, whose layers take stated times."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Layers that sleep for the time that a profile says: a run at scale on few cores."""

    emulate: str | None = option(
        "Profile whose items, step by step, say how long each item's forward and backward take; what arithmetic leaves"
        " of that is slept. CPU only.",
        default=None,
        refers_to="file",
    )
    emulate_scale: float = option("Factor of the profile's times.", default=1.0, above=0)
