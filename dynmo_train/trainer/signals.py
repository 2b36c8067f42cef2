"""Requests to a running training: signals and a time limit, on which all ranks act at the same step boundary.

A signal arrives at one process, or at each at a different time. The handlers only set flags; ``at_boundary`` reduces
the flags over all ranks, so that every rank saves or exits after the same step::

    SIGTERM, SIGINT, SIGUSR1, SIGUSR2 -> flags of this rank -+
    time limit, resize request ------------------------------+-> all_reduce(MAX) -> BoundarySignals

Where the host runs ahead of the device, the reduction takes place during the next step and is read at its end, so that
no rank waits for another one at a boundary.
"""

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
    """Actions of all ranks at a step boundary.

    Attributes:
        save: whether to save a checkpoint.
        exit: whether to end the run after saving.
        exit_code: exit code of a run that a signal ends; 0 without a signal.
        relaunch: whether the launcher restarts the run.
        grow: whether ranks wait to join without a restart.
    """

    save: bool = False
    exit: bool = False
    exit_code: int = EXIT_OK
    relaunch: bool = False
    grow: bool = False


class _Reduction:
    """The maximum of the flags of all ranks, in progress: one rank that has received a signal is enough."""

    def __init__(self, world: World, flags: list[bool]) -> None:
        self._flags = torch.tensor(flags, dtype=torch.int64)
        self._work: dist.Work | None = None
        if world.size > 1:
            group = world.groups.world
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> list[bool]:
        if self._work is not None:
            self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]


class DistributedSignalHandler:
    """Collects signals between two step boundaries.

    SIGTERM and SIGINT (Ctrl-C) save and exit; a second one exits immediately, without saving. SIGUSR1 saves and
    continues. SIGUSR2 saves and exits for a restart.

    A worker of a launcher treats a repeated SIGTERM or SIGINT as the first one. Slurm and terminals signal the
    launcher and its workers, and the launcher forwards the signal. The launcher kills workers that take too long.

    Args:
        time_limit_s: seconds after which the run is saved and ended; None for no limit.
        now: monotonic clock, in seconds.
        launched: whether this process is a worker of a launcher; None reads it from the environment.
    """

    def __init__(
        self, time_limit_s: float | None, now: Callable[[], float] = time.monotonic, *, launched: bool | None = None
    ) -> None:
        self._now, self._time_limit_s = now, time_limit_s
        self._launched = is_launched(os.environ) if launched is None else launched
        self._start_s = now()
        self.received = {"save": False, "terminate": False, "interrupt": False, "relaunch": False}
        self._handlers: dict[int, Any] = {}
        self._reductions: list[_Reduction] = []

    def __enter__(self) -> DistributedSignalHandler:
        handlers = {
            signal.SIGTERM: self._on_terminate,
            signal.SIGINT: self._on_interrupt,
            signal.SIGUSR1: self._on_save,
            signal.SIGUSR2: self._on_relaunch,
        }
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background commands ("&") so
            del handlers[signal.SIGINT]
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._launched and (self.received["terminate"] or self.received["interrupt"]):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the last checkpoint may still be being written

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.received["save"] = True

    def _on_relaunch(self, _number: int, _frame: FrameType | None) -> None:
        self.received["relaunch"] = True

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self.received["terminate"] and not self._launched:
            raise SystemExit(EXIT_TERMINATED)
        self.received["terminate"] = True

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.received["interrupt"] and not self._launched:
            raise SystemExit(EXIT_INTERRUPTED)
        if not self.received["interrupt"]:
            # os.write and not a stream: the signal may have interrupted a write to that stream.
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted: finishing the step and saving; Ctrl-C again exits now, without saving\n")
        self.received["interrupt"] = True

    def at_boundary(
        self, world: World, *, relaunch: bool = False, grow: bool = False, defer: bool = False
    ) -> BoundarySignals:
        """Agree on what any rank was signalled. Every rank calls this after every step.

        Args:
            world: process groups.
            relaunch: whether this rank knows of a reason to restart the run.
            grow: whether this rank knows of ranks that wait to join.
            defer: whether to return what was received up to the boundary before, without waiting for the other ranks;
                what has arrived since then counts at the next boundary. Equal on all ranks.

        Returns:
            The actions, equal on all ranks.
        """
        received = self.received
        is_over_time = self._time_limit_s is not None and self._now() - self._start_s > self._time_limit_s
        # Read before the collective: a signal that arrives while this rank waits in it counts at the next boundary.
        save, received["save"] = received["save"], False
        relaunch = relaunch or received["relaunch"]
        local = [save, received["terminate"], received["interrupt"], is_over_time, relaunch, grow]
        earlier = self._reductions
        self._reductions = [*earlier, _Reduction(world, local)]
        known = earlier if defer else self._reductions
        self._reductions = [each for each in self._reductions if each not in known]
        agreed = [any(flags) for flags in zip(*(each.wait() for each in known), strict=True)] or [False] * len(local)
        save, terminate, interrupt, is_over_time, relaunch, grow = agreed
        exit_code = EXIT_TERMINATED if terminate else EXIT_INTERRUPTED if interrupt else EXIT_OK
        return BoundarySignals(
            save=save,
            exit=bool(exit_code) or is_over_time or relaunch,
            exit_code=exit_code,
            relaunch=relaunch and not exit_code,
            grow=grow,
        )
