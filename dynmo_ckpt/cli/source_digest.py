"""A digest of what a conversion depends on besides its input: the version, the code and the tables of this package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .. import __version__


def source_digest() -> str:
    """Another value once a module or a table of the package changes; the same wherever it is installed."""
    folder = Path(__file__).parents[1]  # the package
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(path for pattern in ("*.py", "*.json") for path in folder.rglob(pattern)):
        payload = path.read_bytes()
        digest.update(f"\0{path.relative_to(folder).as_posix()}\0{len(payload)}\0".encode())
        digest.update(payload)
    return digest.hexdigest()[:16]
