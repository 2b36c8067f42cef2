"""The optimizers by name of ``--optimizer``. A new one is a module of this folder and a line of this table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...config.sections.optimizer import OptimizerConfig, OptimizerName
from .adafactor import AdafactorSettings
from .adamw import AdamWSettings
from .muon import MuonSettings
from .protocol import OptimizerSettings
from .sgd import SGDSettings

OPTIMIZERS: Mapping[OptimizerName, type[OptimizerSettings]] = {
    "adam": AdamWSettings,
    "sgd": SGDSettings,
    "muon": MuonSettings,
    "adafactor": AdafactorSettings,
}


def optimizer_settings(config: OptimizerConfig) -> OptimizerSettings:
    """Return the settings of the optimizer of a run."""
    return OPTIMIZERS[config.optimizer].from_config(config)


def state_bytes(settings: OptimizerSettings, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of the optimizer state of parameters, by global name, of these ``shapes``."""
    states = [settings.state_shapes(name, shape) for name, shape in shapes.items()]
    return sum(
        math.prod(shape) * settings.state_dtype(key).itemsize for state in states for key, shape in state.items()
    )


def option_of_type(stored_type: str) -> str:
    """Return the name of ``--optimizer`` for ``optimizer.type`` of a checkpoint; the type itself where none has it."""
    return next((name for name, kind in OPTIMIZERS.items() if stored_type == kind.STORED_TYPE), stored_type)
