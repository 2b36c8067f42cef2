"""Paths of a command: expansion of input patterns, and checks of outputs before any work."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from .._common.document import check_regular
from .._common.errors import UsageError
from .atomic_write import refuse_existing
from .codecs import check_ending
from .foreign import hint_of_absent, is_scheme, pattern_of_folder


def expand_inputs(patterns: Iterable[str | Path]) -> tuple[Path, ...]:
    """Expand patterns to files: sorted per pattern, in the order of the patterns, without repetition.

    Raises:
        UsageError: a pattern matches no file, or a file has an unsupported format.
    """
    found: dict[Path, None] = {}
    for pattern in map(str, patterns):
        # A file of exactly this name counts, also if its name has brackets, which are signs of a pattern.
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            hint = hint_of_absent(pattern)
            raise UsageError(f"{pattern}: no file has this name or matches this pattern{'; ' if hint else ''}{hint}")
        for name in paths:
            path = Path(name)
            if path.is_dir():
                raise UsageError(f"{path}: is a folder; name its files, for example '{pattern_of_folder(name)}'")
            check_ending(path, is_output=False)
            check_regular(path)
            found[path] = None
    return tuple(found)


def check_output(inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Refuse an output that is an input, or two outputs that are the same file.

    Args:
        inputs: files that are read.
        outputs: files and folders to write.

    Raises:
        UsageError: one of both.
    """
    # By real path: a link to an input, or another spelling of its path, is the same file.
    real = {path.resolve(): path for path in inputs}
    known: set[Path] = set()
    for output in outputs:
        if output.resolve() in real:
            raise UsageError(f"{output}: is both input and output; choose another output")
        if output.resolve() in known:
            raise UsageError(f"{output}: is used for two outputs; choose different files")
        known.add(output.resolve())


def check_writable(outputs: Sequence[Path], folders: Collection[Path] = (), tables: Collection[Path] = ()) -> None:
    """Refuse outputs that cannot be written, before any work.

    Args:
        outputs: files and folders to write.
        folders: the outputs that are folders.
        tables: the outputs with tab-separated columns.

    Raises:
        UsageError: a file exists as a folder or vice versa, its folder is not writable, or its extension is that of
            another format.
    """
    for output in outputs:
        if (scheme := output.parts[:1]) and is_scheme(scheme[0]) and not os.path.exists(scheme[0]):
            address = str(output).replace(":/", "://", 1)  # a path has one slash only
            raise UsageError(f"{address}: addresses cannot be written; name a local file, and copy it then")
        if output in folders and output.exists() and not output.is_dir():
            raise UsageError(f"{output}: is a file, but this output is a folder; choose another name")
        if output not in folders and output.is_dir():
            raise UsageError(f"{output}: is a folder, but this output is a file; name a file, such as '{output}/out'")
        if output not in folders:
            check_ending(output, is_output=True, is_table=output in tables)
        # The folder may not exist yet. The nearest existing one decides whether it can be created.
        parent = next((folder for folder in output.parents if folder.exists()), Path())
        if not parent.is_dir():
            raise UsageError(f"{output}: {parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{output}: the folder {parent} is not writable; choose another output")


def check_new_outputs(
    inputs: Sequence[Path], outputs: Sequence[Path], *, overwrite: bool, tables: Collection[Path] = ()
) -> None:
    """Refuse outputs that are inputs, cannot be written, or exist without ``overwrite``.

    Args:
        inputs: files that are read.
        outputs: files to write.
        overwrite: existing outputs may be replaced.
        tables: the outputs with tab-separated columns.

    Raises:
        UsageError: one of these; see ``check_output``, ``check_writable`` and ``refuse_existing``.
    """
    check_output(inputs, outputs)
    check_writable(outputs, tables=tables)
    if not overwrite:
        refuse_existing(outputs)
