"""The kinds of error of ``dynmo-ckpt`` beyond wrong usage, each with its exit code (tabled in the README)."""

from __future__ import annotations

from ._common.errors import DynmoError

EXIT_DIFFERENCE = 1


class UnsafePickleError(DynmoError):
    """A pickle asks for something other than plain data; it was not executed."""

    exit_code = 3


class CorruptError(DynmoError):
    """Input that is missing, altered, incomplete or contradicts itself."""

    exit_code = 4


class UnsupportedError(DynmoError):
    """A layout, family or tensor that cannot be mapped without losing something."""

    exit_code = 5


class NoStateError(UnsupportedError):
    """Optimizer state was asked for, and the input holds none."""


class StorageError(DynmoError):
    """The system refused to read or write: no space, no permission, a fault of the device."""

    exit_code = 6
