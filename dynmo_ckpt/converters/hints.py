"""What an input without a checkpoint probably is, in a sentence with the remedy."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ..io.errors import short_names
from ..io.remote import RemotePath

# OWNER/NAME of a repository of the hub.
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
CACHED = re.compile(r"(?:models|datasets|spaces)--.+")
MAX_CHILDREN = 50


def hint(path: Path, is_checkpoint: Callable[[Path], bool]) -> str:
    """What ``path`` probably is; empty where nothing is known.

    Args:
        path: an input without a checkpoint.
        is_checkpoint: whether a directory is one.
    """
    if isinstance(path, RemotePath):
        return ""
    if not path.exists():
        if path.is_symlink():
            return f"is a link to {path.readlink()}, which is missing"
        return f"is missing; hf://{path} is a model of the hub of this name" if HUB_ID.fullmatch(str(path)) else ""
    if path.suffix == ".zip" and path.is_file():
        if not zipfile.is_zipfile(path):
            return "is a damaged archive; download it again"
        return "is an archive without mp_rank_*/model_optim_rng.pt; extract it, and give the directory of the model"
    if path.is_file():
        return "is a file; give the directory that has the configuration and all weights"
    if (path / "snapshots").is_dir():
        found = _snapshot(path)
        return "is a cache of the hub without a snapshot" if found is None else f"is a cache of the hub; give {found}"
    children = sorted(islice(path.iterdir(), MAX_CHILDREN))
    if models := [child.name for child in children if CACHED.fullmatch(child.name)]:
        return f"is the cache of the hub; give models--OWNER--NAME/snapshots/REVISION of {short_names(models)}"
    if absent := [child.name for child in children if child.is_symlink() and not child.exists()]:
        return f"has links to missing files, {short_names(absent)}; download it again, as with `hf download`"
    if (path / "adapter_config.json").is_file():
        return "is an adapter; give its base model, and this directory with --adapter"
    if inner := [child.name for child in children if child.is_dir() and is_checkpoint(child)]:
        return f"is a folder of checkpoints; give one of {short_names(inner)}"
    return ""


def _snapshot(path: Path) -> Path | None:
    """The snapshot of a model in the hub's cache: that of ``main``, else the only one."""
    main = path / "refs" / "main"
    if main.is_file():
        named = path / "snapshots" / main.read_text(errors="replace").strip()[:64]
        if named.is_dir():
            return named
    return next(iter(sorted((path / "snapshots").iterdir())), None)
