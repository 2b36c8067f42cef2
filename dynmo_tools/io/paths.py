"""Paths of a command: patterns of inputs expanded, and outputs checked before any work."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from .._common.document import check_regular
from .._common.errors import UsageError
from .atomic_write import refuse_existing
from .codecs import check_ending


def expand_inputs(patterns: Iterable[str | Path]) -> tuple[Path, ...]:
    """Files and globs as a list of files: globs sorted, the order of the patterns kept, no file twice.

    Raises:
        UsageError: a pattern that names no file, or a file of a format that is not read.
    """
    found: dict[Path, None] = {}
    for pattern in map(str, patterns):
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise UsageError(f"{pattern}: no such file, and as a pattern it matches none")
        for name in paths:
            path = Path(name)
            if path.is_dir():
                raise UsageError(f"{path}: is a folder; name its files, as in '{path}/*.jsonl.zst'")
            check_ending(path, is_output=False)
            check_regular(path)
            found[path] = None
    return tuple(found)


def check_output(inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Refuse an output that is one of the inputs, or two outputs that are one file."""
    real = {path.resolve(): path for path in inputs}
    seen: set[Path] = set()
    for output in outputs:
        if output.resolve() in real:
            raise UsageError(f"{output}: is both input and output; choose another output")
        if output.resolve() in seen:
            raise UsageError(f"{output}: is named as output twice")
        seen.add(output.resolve())


def check_writable(outputs: Sequence[Path], folders: Collection[Path] = (), tables: Collection[Path] = ()) -> None:
    """Refuse outputs that cannot be written, before any work.

    Args:
        outputs: files to write, and folders.
        folders: those of them that are folders.
        tables: those of them with columns between tabs.

    Raises:
        UsageError: a file's name is that of a folder, or the other way round; its folder cannot be written; or its
            ending is that of another format.
    """
    for output in outputs:
        if output in folders and output.exists() and not output.is_dir():
            raise UsageError(f"{output}: is a file; this output is a folder: choose another name")
        if output not in folders and output.is_dir():
            raise UsageError(f"{output}: is a folder; this output is a file: name it, as in '{output}/out'")
        if output not in folders:
            check_ending(output, is_output=True, is_table=output in tables)
        parent = next((folder for folder in output.parents if folder.exists()), Path())
        if not parent.is_dir():
            raise UsageError(f"{output}: {parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{output}: the folder {parent} cannot be written; choose another output")


def check_new_outputs(
    inputs: Sequence[Path], outputs: Sequence[Path], *, overwrite: bool, tables: Collection[Path] = ()
) -> None:
    """Refuse outputs that are inputs, cannot be written, or exist where nothing allows to replace them."""
    check_output(inputs, outputs)
    check_writable(outputs, tables=tables)
    if not overwrite:
        refuse_existing(outputs)
