"""The configuration of a run: options declared once, resolved from flags and a file, then validated.

::

    schema.py ──> options.py ──> command.py       typer parameters; flags of other projects (compat.py)
       │                            │
       │          --config, --recipe, --deepspeed-config
       │                            v
       └───────────────────────> resolve.py ──> Config ──> validate.py (rules/) ──> trainer
"""

from __future__ import annotations

from .balance import BalanceConfig
from .complete import resolve_checked
from .compression import CompressionConfig
from .data import DataConfig
from .emulation import EmulationConfig
from .optimizer import OptimizerConfig
from .options import DefaultContext
from .parallel import ParallelConfig
from .precision import PrecisionConfig
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
from .run import RunConfig
from .schema import Config, ModelConfig
from .techniques import DepthConfig, ExitConfig, FreezingConfig, PruningConfig, SparseAttentionConfig
from .training import TrainingConfig
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
