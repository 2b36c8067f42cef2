"""What a run is asked while it trains: by signals, by the clock. All processes answer at the same step boundary."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .errors import EXIT_TERMINATED
from .launch.worker import is_launched
from .parallel.world import World


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What to do at a boundary: save, leave the run, and why it is left.

    ``told`` says that somebody ended it, ``relaunch`` that it is to be started again.
    """

    save: bool = False
    leave: bool = False
    told: bool = False
    relaunch: bool = False


class Interrupts:
    """Collects wishes between two boundaries.

    SIGTERM saves and leaves, a second one leaves at once; SIGUSR1 saves and goes on, SIGUSR2 saves and leaves to be
    started again; after ``limit_s`` seconds the run is saved and left. A process that got no signal does as the others.

    A launcher's worker (``launched``; by default as the environment says) takes a second SIGTERM for the first: Slurm
    signals the launcher and its workers, and the launcher tells them again. It ends those that take too long.
    """

    def __init__(
        self, limit_s: float | None, now: Callable[[], float] = time.monotonic, *, launched: bool | None = None
    ) -> None:
        self._now, self._limit_s = now, limit_s
        self._launched = is_launched(os.environ) if launched is None else launched
        self._started = now()
        self._asked = {"save": False, "end": False, "relaunch": False}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_end),
            signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._on_save),
            signal.SIGUSR2: signal.signal(signal.SIGUSR2, self._on_relaunch),
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._launched and self._asked["end"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the last checkpoint may still be on its way

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self._asked["save"] = True

    def _on_relaunch(self, _number: int, _frame: FrameType | None) -> None:
        self._asked["relaunch"] = True

    def _on_end(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked["end"] and not self._launched:
            raise SystemExit(EXIT_TERMINATED)
        self._asked["end"] = True

    def at_boundary(self, world: World, *, relaunch: bool = False) -> Wishes:
        """What all processes do now: what any of them was asked. Every process calls this after every step.

        Args:
            relaunch: whether this process knows that the run is to be started again.
        """
        late = self._limit_s is not None and self._now() - self._started > self._limit_s
        again = relaunch or self._asked["relaunch"]
        flags = torch.tensor([self._asked["save"], self._asked["end"], late, again], dtype=torch.int64)
        if world.size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world.groups.everyone)
        self._asked["save"] = False
        save, end, over, again = (bool(flag) for flag in flags.tolist())
        return Wishes(save=save, leave=end or over or again, told=end, relaunch=again and not end)
