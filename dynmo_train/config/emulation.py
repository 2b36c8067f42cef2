"""Options of an emulated run, whose layers sleep for given times."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Emulation of a large run on few cores: layers sleep for the times of a profile."""

    emulate: str | None = option(
        "Profile whose layer times are emulated by sleeping (CPU only).",
        default=None,
        refers_to="file",
    )
    emulate_scale: float = option("Scale factor of the emulated times.", default=1.0, above=0)
