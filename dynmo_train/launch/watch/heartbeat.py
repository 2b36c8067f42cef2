"""Heartbeats of a worker process: step, phase and microbatch in a page of memory that its launcher reads.

The page is a mapped file on a memory file system, one for each rank of the node. A beat is a few stores of 8 bytes and
a read of the clock: no system call, no lock, nothing that blocks. The clock is ``CLOCK_MONOTONIC``, which is the same
for all processes of a host, so that the launcher can compute ages.

::

    worker                                   launcher of the node
    HeartbeatWriter.enter(FORWARD, 3) --> page --> read_heartbeat --> watchdog.find_hang
    faulthandler (STACK_SIGNAL) ---------> file --> stacks
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from .flight_recorder import is_recording, serve_traces

HEARTBEAT_VARIABLE = "DYNMO_HEARTBEATS"
# faulthandler writes the stacks from C, also while the main thread is blocked in a collective.
STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGXCPU)) + (3 if hasattr(signal, "SIGRTMIN") else 0)
_SEQUENCE, _PID, _STEP, _PHASE, _MICROBATCH, _SINCE, _FLAGS, _LIMIT, _NUM_STEPS, _TIMES = range(10)
_NUM_TIMES = 32
_PAGE_BYTES = 4096
_IS_COLD = 1
_RETRIES = 100


class Phase(IntEnum):
    """What a rank does; the order is that within a step."""

    START = 0
    DATA = 1
    BEGIN = 2
    PIPELINE = 3
    FORWARD = 4
    BACKWARD = 5
    REDUCTION = 6
    OPTIMIZER = 7
    RESULT = 8
    TECHNIQUE = 9
    BOUNDARY = 10
    EVALUATE = 11
    PLAN_WAIT = 12
    MIGRATE = 13
    SAVE = 14
    END = 15

    @property
    def text(self) -> str:
        """The phase in words, for messages."""
        return _TEXTS.get(self, self.name.lower())


_TEXTS = {
    Phase.START: "start of the run",
    Phase.DATA: "wait for a batch",
    Phase.BEGIN: "start of the step",
    Phase.PIPELINE: "wait for a neighbor in the pipeline",
    Phase.REDUCTION: "reduction of gradients",
    Phase.RESULT: "sums over all ranks",
    Phase.TECHNIQUE: "dynamic techniques",
    Phase.BOUNDARY: "step boundary",
    Phase.EVALUATE: "evaluation",
    Phase.PLAN_WAIT: "wait for a plan",
    Phase.MIGRATE: "migration",
    Phase.SAVE: "save of a checkpoint",
    Phase.END: "end of the run",
}


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank wrote last.

    Attributes:
        pid: its process.
        step: step that it executes.
        phase: what it does.
        microbatch: microbatch of a forward or backward, from 0.
        since_ns: monotonic time of the last beat.
        is_cold: whether the pipeline was built for this step, so that it compiles or allocates.
        limit_s: ``--distributed-timeout-minutes``, in seconds.
        median_step_s: median of its last 32 steps, in seconds; 0 before the first one.
    """

    pid: int
    step: int
    phase: Phase
    microbatch: int
    since_ns: int
    is_cold: bool
    limit_s: float
    median_step_s: float

    @property
    def text(self) -> str:
        """Phase and microbatch in words."""
        if self.phase in (Phase.FORWARD, Phase.BACKWARD):
            return f"{self.phase.text} of microbatch {self.microbatch}"
        return self.phase.text


class HeartbeatWriter:
    """The page of this process. Without a launcher the page is private memory that nobody reads.

    Args:
        page: mapped memory.
        limit_s: maximum time without a beat, in seconds.
        stacks: file to which ``STACK_SIGNAL`` appends the stacks of all threads; None ignores the signal.
    """

    def __init__(self, page: mmap.mmap, limit_s: float, stacks: BinaryIO | None = None) -> None:
        self._words = memoryview(page).cast("Q")
        self._step_began_ns = 0
        # Open for the life of the process: a signal handler cannot open a file.
        self._stacks = stacks
        if stacks is not None:
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        self._words[_LIMIT] = round(limit_s * 1e3)
        self.enter(Phase.START)
        # Last: a reader ignores a page without a process.
        self._words[_PID] = os.getpid()

    def enter(self, phase: Phase, microbatch: int = 0) -> None:
        """Begin a phase; ``microbatch`` counts from 0 within the step."""
        words = self._words
        # Odd while the words change: a reader takes none of a half-written beat.
        words[_SEQUENCE] += 1
        words[_PHASE] = phase
        words[_MICROBATCH] = microbatch
        words[_SINCE] = time.monotonic_ns()
        words[_SEQUENCE] += 1

    def begin_step(self, step: int, *, is_cold: bool) -> None:
        """Begin a step.

        Args:
            step: its number.
            is_cold: whether the pipeline has to be built for it.
        """
        self._words[_STEP] = step
        self._words[_FLAGS] = _IS_COLD if is_cold else 0
        self.enter(Phase.BEGIN)
        self._step_began_ns = self._words[_SINCE]

    def end_step(self) -> None:
        """Count the time of the step, unless the pipeline was built for it."""
        if not self._words[_FLAGS]:
            count = self._words[_NUM_STEPS]
            self._words[_TIMES + count % _NUM_TIMES] = time.monotonic_ns() - self._step_began_ns
            self._words[_NUM_STEPS] = count + 1
        self._words[_FLAGS] = 0
        self.enter(Phase.BOUNDARY)


def silent_heartbeat() -> HeartbeatWriter:
    """A writer whose beats nobody reads."""
    return HeartbeatWriter(mmap.mmap(-1, _PAGE_BYTES), 0.0)


def page_path(folder: Path, name: str, rank: int) -> Path:
    """The page of a rank in the round ``name``."""
    return folder / f"{name}-{rank}.page"


def stack_path(folder: Path, name: str, rank: int) -> Path:
    """The file that a rank's stacks are written to."""
    return folder / f"{name}-{rank}.stack"


def open_heartbeat(environment: Mapping[str, str], limit_s: float) -> HeartbeatWriter:
    """The heartbeat of this process; beats are not read where no launcher watches it.

    Args:
        environment: environment of the process.
        limit_s: ``--distributed-timeout-minutes``, in seconds.
    """
    folder, name = environment.get(HEARTBEAT_VARIABLE), environment.get("TORCHELASTIC_RUN_ID")
    if not folder or not name or not Path(folder).is_dir():
        return silent_heartbeat()
    rank = int(environment["RANK"])
    path = page_path(Path(folder), name, rank)
    if is_recording(environment):
        serve_traces(Path(folder), name, rank)
    with path.open("w+b") as handle:
        handle.truncate(_PAGE_BYTES)
        page = mmap.mmap(handle.fileno(), _PAGE_BYTES)
    # The handler is registered before the first beat: the launcher signals only processes that have one.
    return HeartbeatWriter(page, limit_s, stack_path(Path(folder), name, rank).open("wb"))


def read_heartbeat(folder: Path, name: str, rank: int) -> Heartbeat | None:
    """The last beat of a rank; None before the first one.

    A process that was stopped within a beat leaves it half-written. It is then read as it is.
    """
    try:
        content = page_path(folder, name, rank).read_bytes()
        for _ in range(_RETRIES):
            again = page_path(folder, name, rank).read_bytes()
            if content == again and not int.from_bytes(content[:8], "little") % 2:
                break
            content = again
    except OSError:
        return None
    return parse_page(content)


def parse_page(content: bytes) -> Heartbeat | None:
    """The beat in the bytes of a page; None where no process has written it yet."""
    if len(content) < _PAGE_BYTES:
        return None
    words = memoryview(content)[:_PAGE_BYTES].cast("Q")
    if not words[_PID]:
        return None
    count = min(words[_NUM_STEPS], _NUM_TIMES)
    times = sorted(words[_TIMES : _TIMES + count])
    return Heartbeat(
        pid=words[_PID],
        step=words[_STEP],
        phase=Phase(min(words[_PHASE], Phase.END)),
        microbatch=words[_MICROBATCH],
        since_ns=words[_SINCE],
        is_cold=bool(words[_FLAGS] & _IS_COLD),
        limit_s=words[_LIMIT] / 1e3,
        median_step_s=times[count // 2] / 1e9 if count else 0.0,
    )
