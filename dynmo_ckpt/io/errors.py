"""Errors of ``dynmo-ckpt`` with their exit codes (table in the README), and how messages show names from files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .._common.document import SHORT_CHARACTERS, short_repr
from .._common.errors import DynmoError

EXIT_DIFFERENCE = 1


class UnsafePickleError(DynmoError):
    """A pickle refers to something other than plain data; it was not executed."""

    exit_code = 3


class CorruptError(DynmoError):
    """Input that is missing, altered, incomplete or contradicts itself."""

    exit_code = 4


class UnsupportedError(DynmoError):
    """A layout, model family or tensor that cannot be mapped without loss."""

    exit_code = 5


class NoOptimizerStateError(UnsupportedError):
    """The optimizer state was requested, and the input has none."""


class StorageError(DynmoError):
    """The system refused to read or write: no space, no permission, a device error."""

    exit_code = 6


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Put a file in front of the messages of functions that know its contents alone, with its last name or none.

    Raises:
        CorruptError: as in the block.
        UnsupportedError: as in the block.
    """
    try:
        yield
    except (CorruptError, UnsupportedError) as error:
        raise type(error)(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error


def short_name(name: object) -> str:
    """A name from a file, for a message: printable, and at most ``SHORT_CHARACTERS`` characters."""
    if not isinstance(name, str):  # nested lists of a pickle have a repr of exponential length
        return short_repr(name)
    text = name[: SHORT_CHARACTERS + 1]
    if not text.isprintable():
        text = repr(text)[1:-1]
    return text if len(text) <= SHORT_CHARACTERS else text[: SHORT_CHARACTERS - 3] + "..."


def short_names(names: Iterable[object], limit: int = 5) -> str:
    """The first ``limit`` names in order of appearance, shortened, with ``...`` where there are more."""
    listed = list(names)
    return ", ".join([*map(short_name, listed[:limit]), *(["..."] if len(listed) > limit else [])])
