"""What a run is asked while it trains: by signals, by the clock. All processes answer at the same step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .._common.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from ..launch.worker import is_launched
from ..parallel.process_groups import World


@dataclass(frozen=True, kw_only=True)
class BoundarySignals:
    """What to do at a boundary: save, leave the run, and why it is left.

    ``code`` is the exit code of a run that a signal ended, 0 where none did; ``relaunch`` says that the run is to be
    started again.
    """

    save: bool = False
    leave: bool = False
    code: int = EXIT_OK
    relaunch: bool = False


class DistributedSignalHandler:
    """Collects wishes between two boundaries.

    SIGTERM and SIGINT (Ctrl-C) save and leave, a second one leaves at once; SIGUSR1 saves and continues, SIGUSR2 saves
    and leaves to be started again; after ``limit_s`` seconds the run is saved and left. A process that got no signal
    does as the others.

    A launcher's worker (``launched``; by default as the environment says) takes a second SIGTERM or SIGINT for the
    first: Slurm and terminals signal the launcher and its workers, and the launcher signals them again. It ends those
    that take too long.
    """

    def __init__(
        self, limit_s: float | None, now: Callable[[], float] = time.monotonic, *, launched: bool | None = None
    ) -> None:
        self._now, self._limit_s = now, limit_s
        self._launched = is_launched(os.environ) if launched is None else launched
        self._started = now()
        self._asked = {"save": False, "end": False, "interrupt": False, "relaunch": False}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> DistributedSignalHandler:
        handlers = {
            signal.SIGTERM: self._on_end,
            signal.SIGINT: self._on_interrupt,
            signal.SIGUSR1: self._on_save,
            signal.SIGUSR2: self._on_relaunch,
        }
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a command that ends in "&"
            del handlers[signal.SIGINT]
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._launched and (self._asked["end"] or self._asked["interrupt"]):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the last checkpoint may still be on its way

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self._asked["save"] = True

    def _on_relaunch(self, _number: int, _frame: FrameType | None) -> None:
        self._asked["relaunch"] = True

    def _on_end(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked["end"] and not self._launched:
            raise SystemExit(EXIT_TERMINATED)
        self._asked["end"] = True

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked["interrupt"] and not self._launched:
            raise SystemExit(EXIT_INTERRUPTED)
        if not self._asked["interrupt"]:
            with contextlib.suppress(OSError):  # not a stream: the signal may have interrupted a write to it
                os.write(2, b"interrupted: finishing the step and saving; Ctrl-C again ends at once, without saving\n")
        self._asked["interrupt"] = True

    def at_boundary(self, world: World, *, relaunch: bool = False) -> BoundarySignals:
        """What all processes do now: what any of them was asked. Every process calls this after every step.

        Args:
            relaunch: whether this process knows that the run is to be started again.
        """
        late = self._limit_s is not None and self._now() - self._started > self._limit_s
        again = relaunch or self._asked["relaunch"]
        asked = self._asked
        # Taken before the collective: a signal that comes while this process waits in it counts at the next boundary.
        save_now, asked["save"] = asked["save"], False
        flags = torch.tensor([save_now, asked["end"], asked["interrupt"], late, again], dtype=torch.int64)
        if world.size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world.groups.world)
        save, end, interrupt, over, again = (bool(flag) for flag in flags.tolist())
        code = EXIT_TERMINATED if end else EXIT_INTERRUPTED if interrupt else EXIT_OK
        return BoundarySignals(save=save, leave=bool(code) or over or again, code=code, relaunch=again and not code)
