"""The registry of checkpoint formats: built-in ones, and those of other installed packages.

A format is one ``CheckpointFormat`` object. Its ``read`` turns an input into the common form, a ``NativeCheckpoint``
(a manifest and lazily read tensors under DynMo's names); its ``write`` plans files from that form. So N formats need N
readers and N writers, not N x N converters::

    PATH --detect()--> CheckpointFormat --read()--> NativeCheckpoint --write()--> ExportPlan --> operations.write

Built-in formats are listed in ``BUILTIN`` (``__init__.py``), in the order in which ``detect`` tries them. Another
package registers a format with an entry point in the group ``dynmo_ckpt.formats``, whose name is the value of
``--from`` and ``--to``::

    [project.entry-points."dynmo_ckpt.formats"]
    packed = "my_package.packed:PACKED"

Modules are imported when a format is asked for: ``--help`` and ``info`` of a native checkpoint import no other reader.
Entry points are searched last, for the scan of all installed packages takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.console import print_message
from .._common.document import short_repr
from .._common.errors import DynmoError, UsageError
from ..formats.choices import AUTO, ReadOptions, WriteOptions
from ..io.errors import CorruptError, NoOptimizerStateError
from ..io.remote import RemotePath
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan
from . import ALIASES, BUILTIN, NOT_READ
from .hints import hint

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "dynmo_ckpt.formats"
DEFAULT_READ = ReadOptions()
# Options that only some formats have, by field.
OPTIONS = {
    "vocab_size": "--vocab-size",
    "num_attention_heads": "--num-attention-heads",
    "sparse": "--sparse",
    "first_replica": "--replicas first",
    "untie": "--untie",
    "drop": "--drop",
    "config": "--config",
    "adapters": "--adapter",
}
MEGATRON_OPTIONS = tuple(name for name in OPTIONS if name != "adapters")


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """How to recognize, read and write checkpoints of one format.

    Attributes:
        name: the value of ``--from`` and ``--to``.
        description: what ``dynmo-ckpt formats`` prints, in a few words.
        marker: the files that show the format, for the message about an input of no known format.
        detect: whether a path is a checkpoint of this format. It looks at file names and reads no tensor.
        read: opens a path, reading no tensor's bytes; also returns remarks for the user. None: cannot be read.
        write: plans the files of a new checkpoint. None: cannot be written.
        topology: the fields of ``WriteOptions`` that ``write`` uses, of ``tp``, ``pp``, ``vpp``, ``partition``.
        stores_optimizer: whether ``write`` can include the optimizer state.
        has_steps: whether a path may be a run directory with several steps, so that ``--step`` has a meaning.
        options: the fields of ``ReadOptions`` that ``read`` uses, of those in ``OPTIONS``; None: all.
    """

    name: str
    description: str
    marker: str
    detect: Callable[[Path], bool]
    read: Callable[[Path, ReadOptions], tuple[NativeCheckpoint, list[str]]] | None = None
    write: Callable[[NativeCheckpoint, WriteOptions], ExportPlan] | None = None
    topology: tuple[str, ...] = ()
    stores_optimizer: bool = False
    has_steps: bool = False
    options: tuple[str, ...] | None = None


def get_format(name: str, without: Sequence[str] = ()) -> CheckpointFormat:
    """The format of a name, or of its name in another program.

    Args:
        name: the name.
        without: built-in formats that a message does not offer, because they cannot be read or written.

    Raises:
        UsageError: no format or several packages have this name, or the module of the format cannot be imported.
    """
    lower = name.lower()
    name = ALIASES.get(lower, lower if lower in BUILTIN else name)
    if name in BUILTIN:
        return _builtin(name)
    entries = [entry for entry in _entry_points() if entry.name == name]
    if not entries:
        offered = [each for each in BUILTIN if each not in without]
        known = ", ".join([*offered, *sorted({entry.name for entry in _entry_points()})])
        raise UsageError(f"{short_repr(name)}: not a checkpoint format; choose from {known}")
    if len(entries) > 1:
        packages = " and ".join(sorted(map(_package, entries)))
        raise UsageError(f"checkpoint format {name!r}: registered by {packages}; uninstall one of these packages")
    return _load(entries[0])


def detect(path: Path) -> CheckpointFormat:
    """The format of the checkpoint at ``path``.

    Raises:
        CorruptError: no format recognizes it. The message names the known formats, and packages that failed to load.
        StorageError: an object store cannot be reached or denies access.
    """
    if isinstance(path, RemotePath):
        path.check_complete()
    formats = []
    for name in BUILTIN:
        formats.append(_builtin(name))
        if formats[-1].detect(path):
            return formats[-1]
    # Last: no package can take over a checkpoint that a built-in format recognizes.
    external, failures = external_formats()
    for _, found in external:
        formats.append(found)
        if found.detect(path):
            return found
    known = "; ".join(f"{found.name} ({found.marker})" for found in formats if found.read is not None)
    found_instead = hint(path, _is_checkpoint)
    reason = f"no checkpoint here; {'it ' + found_instead if found_instead else f'known formats are {known}'}"
    raise CorruptError("\n  ".join([f"{path}: {reason}", *failures]))


def _is_checkpoint(path: Path) -> bool:
    with suppress(DynmoError, OSError):
        return any(_builtin(name).detect(path) for name in BUILTIN)
    return False


def open_checkpoint(
    path: Path, name: str = AUTO, options: ReadOptions = DEFAULT_READ
) -> tuple[NativeCheckpoint, list[str]]:
    """Open ``path`` as a native checkpoint; no tensor's bytes are read, except where replicas are compared.

    Args:
        path: the input.
        name: its format; ``auto`` detects it.
        options: how to read it.

    Returns:
        The checkpoint, and remarks for the user.

    Raises:
        UsageError: an unknown format, or options that it does not have.
        CorruptError: files are missing, altered or contradict each other.
        StorageError: an object store cannot be reached or denies access.
        UnsupportedError: a model or tensor that cannot be mapped.
        UnsafePickleError: a pickle refers to more than plain data.
    """
    if isinstance(path, RemotePath):
        path.check_complete()
    found = detect(path) if name == AUTO else get_format(name, NOT_READ)
    if found.read is None:
        raise UsageError(f"{path}: checkpoints of the format {found.name} can only be written")
    check_options(path, found, options)
    if not options.optimizer_if_present:
        return found.read(path, options)
    # Only opening shows whether there is a state. A second open is cheap, for no tensor is read.
    options = replace(options, optimizer_if_present=False, with_optimizer=True)
    try:
        return found.read(path, options)
    except NoOptimizerStateError as error:
        checkpoint, remarks = found.read(path, replace(options, with_optimizer=False))
        return checkpoint, [*remarks, str(error)]


def check_options(path: Path, found: CheckpointFormat, options: ReadOptions) -> None:
    """Check that the format of an input has the options that are given.

    Args:
        path: the input, for messages.
        found: its format.
        options: how to read it.

    Raises:
        UsageError: it has not.
    """
    if options.step is not None and not found.has_steps:
        raise UsageError(f"{path}: --step selects a step of a run directory; {found.name} checkpoints have one step")
    if field := next(iter(_unused(found, options)), None):
        remedy = "; convert this checkpoint with --to hf first" if field == "adapters" else ""
        raise UsageError(f"{path}: {OPTIONS[field]}: has no effect on {found.name} checkpoints; leave it out{remedy}")


def _unused(found: CheckpointFormat, options: ReadOptions) -> list[str]:
    """The fields of options that are given and have no effect on a format."""
    unused = [] if found.options is None else sorted(set(OPTIONS) - set(found.options))
    return [name for name in unused if getattr(options, name) != getattr(DEFAULT_READ, name)]


def open_sides(left: Path, right: Path, options: ReadOptions) -> list[tuple[NativeCheckpoint, list[str]]]:
    """Open two checkpoints to compare them, as :func:`open_checkpoint` does; options apply where a format has them.

    Args:
        left: the first one, of which ``options.step`` selects a step.
        right: the other one.
        options: how to read both.

    Raises:
        UsageError: neither format has an option that is given.
    """
    sides = [(left, options), (right, replace(options, step=None))]
    unused = [_unused(detect(path), read) for path, read in sides]
    opened = []
    for (path, read), own, other in zip(sides, unused, reversed(unused), strict=True):
        # One that no side has is left to the error of opening.
        plain: dict[str, Any] = {name: getattr(DEFAULT_READ, name) for name in own if name not in other}
        opened.append(open_checkpoint(path, AUTO, replace(read, **plain)))
    return opened


def open_and_report(source: Path, name: str, options: ReadOptions) -> NativeCheckpoint:
    """Open ``source`` as :func:`open_checkpoint` does, with its errors; print the remarks."""
    checkpoint, remarks = open_checkpoint(source, name, options)
    for remark in remarks:
        print_message(remark)
    return checkpoint


def external_formats() -> tuple[list[tuple[str, CheckpointFormat]], list[str]]:
    """Formats of other packages, each with its package, by name; and a message for each that cannot be loaded."""
    loaded, failures = [], []
    for entry in sorted(_entry_points(), key=lambda entry: (entry.name, _package(entry))):
        try:
            loaded.append((_package(entry), _load(entry)))
        except UsageError as error:
            failures.append(str(error))
    return loaded, failures


def _builtin(name: str) -> CheckpointFormat:
    module, _, attribute = BUILTIN[name].partition(":")
    found: CheckpointFormat = getattr(import_module(f"{__package__}.{module}"), attribute)
    return found


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # imports the email parser; most commands need no outside format

    return list(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _load(entry: EntryPoint) -> CheckpointFormat:
    """Import the format of an entry point; raises ``UsageError``, which names the package, where that fails."""
    where = f"checkpoint format {entry.name!r} of the package {_package(entry)}: {entry.value}"
    if entry.name in (AUTO, *BUILTIN, *ALIASES):
        raise UsageError(f"{where}: the name is taken by a built-in format; rename the entry point")
    try:
        loaded = entry.load()
    # The module of another package may raise anything. The user must learn which package it is.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{where} cannot be imported ({reason}); update or uninstall the package") from error
    if not isinstance(loaded, CheckpointFormat) or loaded.name != entry.name:
        raise UsageError(f"{where} must be a CheckpointFormat with the name {entry.name!r}; update the package")
    return loaded
