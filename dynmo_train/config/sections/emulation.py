"""Options of an emulated run, whose layers sleep for given times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import panels
from ..options import option


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Emulation of a large run on few cores: layers sleep for the times of a profile."""

    PANEL: ClassVar[str] = panels.DRY_RUN

    emulate: str | None = option(
        "Profile whose layer times are emulated by sleeping (CPU only).", default=None, refers_to="file", common=True
    )
    emulate_slow: str | None = option(
        "Slow worker of an emulated run: WORKER:FACTOR:FIRST:LAST step.",
        default=None,
    )
    emulate_scale: float = option("Scale factor of the emulated times.", default=1.0, above=0)
