"""Options and checks that several commands share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .._common.document import is_count
from .._common.errors import MissingExtraError, UsageError
from ..config.panels import CONFIGURATION


class DeviceName(StrEnum):
    """Device type."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="TOML file of options; flags have precedence.",
        rich_help_panel=CONFIGURATION,
    ),
]


def need_torch() -> None:
    """Check that torch is installed, without importing it, which would take seconds.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "train")


@contextlib.contextmanager
def ignore_signals_until_training() -> Iterator[None]:
    """Ignore SIGUSR1 and SIGUSR2 until the training loop installs its handlers.

    These signals request a checkpoint, and their default action ends the process. A run that is starting or about to
    end has no new state to save.
    """
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    try:
        before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    except ValueError:  # only the main thread can set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def world_size() -> int:
    """``WORLD_SIZE`` from the launcher; 1 without a launcher.

    Raises:
        UsageError: it is not a positive integer.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not is_count(text) or text == "0":
        raise UsageError(f"WORLD_SIZE={text!r}: must be a positive integer, the number of processes")
    return int(text)


def is_rank0() -> bool:
    """Whether this process has rank 0, which prints for all."""
    return os.environ.get("RANK", "0") == "0"
