"""The cache of native checkpoints that ``dynmo-ckpt`` converted for ``--load``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..._common.document import DocumentError, read_any_json
from ..._common.errors import UsageError
from ...formats.os_errors import reason

# The names of load_checkpoint.cached_name; other entries of the folder are never touched.
NAME = re.compile(r".+-[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model.

    Attributes:
        path: its folder.
        source: path of the original; empty where it is not recorded.
        num_bytes: total size.
        modified: time of the conversion.
    """

    path: Path
    source: str
    num_bytes: int
    modified: datetime


def conversions(cache: Path) -> list[Conversion]:
    """List the converted models of a folder by name; empty if the folder does not exist.

    Raises:
        UsageError: the folder cannot be read.
    """
    try:
        found = sorted(path for path in cache.iterdir() if _is_conversion(path)) if cache.is_dir() else []
        return [_conversion(path) for path in found]
    except OSError as error:
        raise UsageError(f"--cache-dir {cache}: cannot be read: {reason(error)}") from error


def remove(cache: Path, names: Sequence[str]) -> list[Conversion]:
    """Remove converted models.

    Args:
        cache: folder of the converted models.
        names: names to remove; empty removes all.

    Returns:
        The removed models.

    Raises:
        UsageError: a name does not exist, or a folder cannot be removed.
    """
    found = {each.path.name: each for each in conversions(cache)}
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: not in {cache}; list shows the names")
    chosen = [found[name] for name in (names or found)]
    for each in chosen:
        try:
            shutil.rmtree(each.path)
        except OSError as error:
            raise UsageError(f"{each.path}: cannot be removed: {reason(error)}") from error
    return chosen


def _is_conversion(path: Path) -> bool:
    is_complete = NAME.fullmatch(path.name) is not None and (path / "manifest.json").is_file()
    return is_complete and path.is_dir() and not path.is_symlink()


def _conversion(path: Path) -> Conversion:
    try:
        document = read_any_json(path / "conversion.json")
        source = str(document.get("source", "")) if isinstance(document, dict) else ""
    except DocumentError:
        source = ""
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    modified = datetime.fromtimestamp((path / "manifest.json").stat().st_mtime, UTC)
    return Conversion(path=path, source=source, num_bytes=num_bytes, modified=modified)
