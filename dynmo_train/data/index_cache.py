"""A directory of arrays that take long to build; cached arrays are memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.document import DocumentError, read_any_json

Arrays = Mapping[str, npt.NDArray[Any]]
# Smaller arrays are built in less time than they are read.
MIN_CACHED_BYTES = 1 << 20


def index_identity(prefix: str) -> dict[str, Any]:
    """Identity of a data set in a cache key: absolute path, and size (bytes) and time (ns) of its ``.idx`` file."""
    # Size and time, not a digest: an index can have gigabytes, and every start asks.
    stat = os.stat(f"{prefix}.idx") if os.path.exists(f"{prefix}.idx") else None
    return {"prefix": os.path.abspath(prefix), "index_file": [stat.st_size, stat.st_mtime_ns] if stat else None}


def cached_arrays(cache: Path | None, cache_key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``build``, from the cache where it has them for the same key.

    Arrays below ``MIN_CACHED_BYTES`` are not cached. A cache that cannot be written is not an error: the arrays then
    stay in memory.

    Args:
        cache: directory; None does not cache.
        cache_key: everything that the arrays depend on: name -> JSON value.
        build: makes the arrays by name.
    """
    if cache is None:
        return build()
    stem = cache / hashlib.sha256(json.dumps(cache_key, sort_keys=True).encode()).hexdigest()[:32]
    if (found := _read(stem)) is not None:
        return found
    built = build()
    if sum(array.nbytes for array in built.values()) < MIN_CACHED_BYTES:
        return built
    try:
        _write(stem, built, cache_key)
    except OSError:
        return built
    # Read back as a memory map, which the processes of a host share.
    return _read(stem) or built


def _read(stem: Path) -> Arrays | None:
    try:
        names = read_any_json(Path(f"{stem}.json"))["arrays"]
        return {name: np.load(f"{stem}-{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    # A damaged or missing entry is built again.
    except (OSError, ValueError, KeyError, TypeError, DocumentError):
        return None


def _write(stem: Path, arrays: Arrays, cache_key: Mapping[str, Any]) -> None:
    """Write each file under a unique name, then rename it: several processes may write the same index."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    ending = f".tmp-{secrets.token_hex(4)}"
    for name, array in arrays.items():
        with open(f"{stem}-{name}{ending}", "wb") as handle:
            np.save(handle, array, allow_pickle=False)
        os.replace(f"{stem}-{name}{ending}", f"{stem}-{name}.npy")
    # The JSON file comes last: readers look for it first, so they never find an index of which an array is missing.
    with open(f"{stem}{ending}", "w", encoding="utf-8") as handle:
        json.dump({**cache_key, "arrays": list(arrays)}, handle, indent=2)
    os.replace(f"{stem}{ending}", f"{stem}.json")
