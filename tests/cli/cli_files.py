"""Paths and readers of files that several tests of the command lines use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tests.paths import CONTRACTS

EVENTS = CONTRACTS / "profile/valid/events.jsonl"


def torch_tree(path: Path) -> Any:
    """The contents of a legacy checkpoint's file, read by torch without running any code."""
    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)
