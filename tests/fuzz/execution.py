"""One execution of a target under limits of time and memory, and what a defect is.

Time is processor time, so that a busy machine reports no hang. Memory is address space beyond that of the process after
it has executed its seeds: a header that claims 2**60 elements is refused, or its allocation fails here at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.mutations import MAX_BYTES
from tests.fuzz.target import Target, quiet
from tests.paths import ROOT

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one execution: processor time in seconds, and bytes of new address space."""

    seconds: float = 5.0
    memory_bytes: int = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A defect of a parser.

    Attributes:
        target: name of the target.
        kind: ``error`` (not documented), ``hang``, ``memory`` or ``crash`` (the process ended).
        place: what identifies the defect: the error and the last line of the project that it passed.
        detail: the traceback.
        data: the input.
    """

    target: str
    kind: str
    place: str
    detail: str
    data: bytes


class HangError(BaseException):
    """The execution has used its processor time; no ``except Exception`` of a parser catches it."""


def _raise_hang(_signum: int, _frame: FrameType | None) -> None:
    raise HangError


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Within: an execution that takes too long raises ``HangError``; one that allocates too much, ``MemoryError``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, _raise_hang)
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory_bytes, before[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


class Page:
    """A file in memory that a parent reads after a crash: the number of executions, and the current input."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16 + MAX_BYTES))
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), 0)

    @property
    def count(self) -> int:
        """Number of the execution that runs, from 0."""
        return int.from_bytes(self._map[:8], "little")

    @property
    def data(self) -> bytes:
        """The input of the execution that runs."""
        return self._map[16 : 16 + int.from_bytes(self._map[8:16], "little")]

    def write(self, count: int, data: bytes) -> None:
        """Record an execution before it runs."""
        self._map[:16] = count.to_bytes(8, "little") + len(data).to_bytes(8, "little")
        self._map[16 : 16 + len(data)] = data


class Executor:
    """Executes a target in this process.

    Args:
        target: the target.
        folder: a folder in memory; the target's files are in a folder of its own within.
        limits: of an execution.
    """

    def __init__(self, target: Target, folder: Path, limits: Limits) -> None:
        self.target, self._limits = target, limits
        self.folder = folder / "files"
        self._made = 0
        corpus = folder / "seeds"
        corpus.mkdir(parents=True, exist_ok=True)
        with quiet():
            self.corpus = [seed[:MAX_BYTES] for seed in target.seeds(corpus)]
        shutil.rmtree(corpus)
        if not self.corpus:
            raise ValueError(f"{target.name}: has no seeds")
        self._empty_folder()

    def _empty_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def warm_up(self) -> None:
        """Execute the seeds once without limits: modules are imported, caches filled.

        A defect that a seed shows is found again under the limits.
        """
        with quiet():
            for seed in self.corpus:
                with contextlib.suppress(Exception):
                    self.target.run(seed, self.folder)

    def execute(self, data: bytes) -> Defect | None:
        """Execute the target under ``limited``, which the caller enters.

        Returns:
            The defect that the input shows; None without one.
        """
        signal.setitimer(signal.ITIMER_PROF, self._limits.seconds)
        try:
            self.target.execute(data, self.folder)
        except HangError as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            return self._defect("hang", error, data)
        except MemoryError as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            return self._defect("memory", error, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - panics of Rust are not of the class Exception
            signal.setitimer(signal.ITIMER_PROF, 0)
            return self._defect("error", error, data)
        return None

    def _defect(self, kind: str, error: BaseException, data: bytes) -> Defect:
        self._empty_folder()
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            frame
            for frame in frames
            if f"{os.sep}dynmo_" in frame.filename or f"{os.sep}fuzz{os.sep}" in frame.filename
        ]
        last = own[-1] if own else frames[-1]
        name = os.path.relpath(last.filename, ROOT)
        # A hang is found at any line of its loop.
        place = f"{type(error).__name__} {name}:{last.name}" + ("" if kind == "hang" else f":{last.lineno}")
        with contextlib.suppress(ValueError):
            return Defect(
                target=self.target.name,
                kind=kind,
                place=place,
                detail="".join(traceback.format_exception(error)),
                data=data,
            )
        return Defect(target=self.target.name, kind=kind, place=place, detail=place, data=data)


class Executions:
    """The executions of a task: counts them, and reports one defect of each place.

    Args:
        executor: of the target.
        page: records the current input.
        report: called with each defect.

    Attributes:
        count: number of executions.
    """

    def __init__(self, executor: Executor, page: Page, report: Callable[[Defect], None]) -> None:
        self._executor, self._page, self._report = executor, page, report
        self._known: set[str] = set()
        self.count = 0

    def run(self, data: bytes) -> None:
        """Execute the target on one input."""
        self._page.write(self.count, data)
        found = self._executor.execute(data)
        self.count += 1
        if found is not None and found.place not in self._known:
            self._known.add(found.place)
            self._report(found)
