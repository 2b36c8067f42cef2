"""The configuration of a run: options declared once, resolved from flags and a file, then validated.

::

    schema.py ──> options.py ──> command.py       typer parameters; flags of other projects (compat.py)
       │                            │
       │          --config, --recipe, --deepspeed-config
       │                            v
       └───────────────────────> resolve.py ──> Config ──> validate.py (rules/) ──> trainer
"""

from __future__ import annotations

from .complete import resolve_checked
from .options import DefaultContext
from .resolve import (
    config_document,
    config_of,
    dry_run_processes,
    dry_run_values,
    option_specs,
    read_config_file,
    resolve,
    with_deepspeed,
)
from .schema import Config, ModelConfig
from .sections.balance import BalanceConfig
from .sections.compression import CompressionConfig
from .sections.data import DataConfig
from .sections.emulation import EmulationConfig
from .sections.optimizer import OptimizerConfig
from .sections.parallel import ParallelConfig
from .sections.precision import PrecisionConfig
from .sections.run import RunConfig
from .sections.techniques import DepthConfig, ExitConfig, FreezingConfig, PruningConfig, SparseAttentionConfig
from .sections.training import TrainingConfig
from .validate import check, validate

__all__ = [
    "BalanceConfig",
    "CompressionConfig",
    "Config",
    "DataConfig",
    "DepthConfig",
    "EmulationConfig",
    "ExitConfig",
    "DefaultContext",
    "FreezingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PruningConfig",
    "RunConfig",
    "SparseAttentionConfig",
    "TrainingConfig",
    "check",
    "config_document",
    "config_of",
    "option_specs",
    "read_config_file",
    "resolve",
    "resolve_checked",
    "validate",
    "dry_run_processes",
    "dry_run_values",
    "with_deepspeed",
]
