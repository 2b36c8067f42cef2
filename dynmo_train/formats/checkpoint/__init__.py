"""Writes and reads native checkpoints; ``dynmo-ckpt`` converts, compares and verifies them."""

from .manifest import RunMetadata, build_manifest
from .reader import (
    BASE,
    Checkpoint,
    CheckpointError,
    base_reference,
    find_checkpoint,
    find_damage,
    list_checkpoints,
    open_checkpoint,
    step_of,
)
from .writer import commit, new_staging, prune, remove_stale_staging, write_shard

__all__ = [
    "BASE",
    "Checkpoint",
    "CheckpointError",
    "RunMetadata",
    "base_reference",
    "build_manifest",
    "commit",
    "find_damage",
    "find_checkpoint",
    "list_checkpoints",
    "new_staging",
    "open_checkpoint",
    "prune",
    "remove_stale_staging",
    "step_of",
    "write_shard",
]
