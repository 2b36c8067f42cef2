"""Saves and loads native checkpoints of the trainer's own state; the rest is ``dynmo-ckpt``'s."""

from .manifest import RunFacts, build_manifest
from .reader import Checkpoint, CheckpointError, damage_of, find_checkpoint, list_checkpoints, open_checkpoint
from .writer import commit, new_staging, prune, remove_stale_staging, write_shard

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "RunFacts",
    "build_manifest",
    "commit",
    "damage_of",
    "find_checkpoint",
    "list_checkpoints",
    "new_staging",
    "open_checkpoint",
    "prune",
    "remove_stale_staging",
    "write_shard",
]
