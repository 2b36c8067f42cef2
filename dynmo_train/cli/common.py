"""What several subcommands of ``dynmo-train`` share."""

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

from .._common.errors import MissingExtraError, UsageError


class DeviceName(StrEnum):
    """Where a command computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.toml", help="Options from a TOML file; the command line goes before it."),
]


def need_torch() -> None:
    """Raise ``MissingExtraError`` where torch is not installed; loads nothing."""
    if find_spec("torch") is None:
        raise MissingExtraError("torch", "train")


@contextlib.contextmanager
def ignore_signals_until_training() -> Iterator[None]:
    """SIGUSR1 and SIGUSR2 do nothing here, where they would end the process; the training loop takes them over.

    They ask a run to save: one that still starts, or is about to end, has nothing more to do for it.
    """
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    try:
        before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def world_size() -> int:
    """Processes of this run, as the launcher says; 1 where there is none."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or text == "0":
        raise UsageError(f"WORLD_SIZE must be the number of processes of the run, is {text!r}")
    return int(text)


def is_rank0() -> bool:
    """Whether this is the process that reports for the whole run."""
    return os.environ.get("RANK", "0") == "0"
