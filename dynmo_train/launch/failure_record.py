"""Records why a process of a launched run failed, so that the launcher prints the first cause once.

::

    process: exception --recording_failure--> failure.json    cause in one line, time, whether it is a consequence
                                         └--> stderr.log      WITHHELD, then the whole stack
    launcher: stderr.log of rank 0 --QuietLines--> standard error, up to WITHHELD and without C++ frames
              failure.json of all ranks --exit_status--> one line

The record is written before the process groups are destroyed. That ends the connections of the other ranks, which then
fail, too, and the launcher terminates this process before Python would print the stack.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .._common.console import print_message
from .._common.document import read_any_json, write_whole
from .._common.errors import EXIT_FAILURE, EXIT_USAGE, DynmoError
from .watch.heartbeat import HEARTBEAT_VARIABLE
from .worker import is_launched

WITHHELD = "dynmo-train: the launcher does not print the lines below without --verbose"
MAX_MESSAGE_CHARACTERS = 600
# torch's elastic agent sets this path for each process; its own file is next to the log of the process.
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_CPP_FRAME = re.compile(r"^(?:\[rank\d+\]: ?)?\s*(?:frame #\d+: |Exception raised from )")


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Why a process failed.

    Attributes:
        message: the error in one line.
        time_ns: when it was raised, in nanoseconds since the epoch.
        is_consequence: whether another process failed first.
    """

    message: str
    time_ns: int
    is_consequence: bool


def is_cpp_frame(line: str) -> bool:
    """Whether a line belongs to the C++ stack in a message of torch."""
    return _CPP_FRAME.match(line) is not None


def first_line(text: str) -> str:
    """The first line of a message that is neither blank nor a C++ frame, shortened."""
    lines = (line.strip() for line in text.splitlines() if line.strip() and not is_cpp_frame(line))
    line = next(lines, "")
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def error_line(error: BaseException) -> str:
    """An error in one line: type, message and, where it is not one of ours, the last line of this program."""
    if isinstance(error, DynmoError):
        return first_line(str(error))
    name = type(error).__name__
    text = f"{name}: {message}" if (message := first_line(str(error))) else name
    root = str(Path(__file__).resolve().parents[1])
    # The outermost frame is that of ``recording_failure``.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if frame.filename.startswith(root)]
    place = f" ({Path(frames[-1].filename).relative_to(root)}:{frames[-1].lineno})" if frames else ""
    return text + place


def _record_path(log: Path) -> Path:
    return log.parent / "failure.json"


def _spare_path(environment: Mapping[str, str], rank: int | str, name: str | None = None) -> Path | None:
    """The path of a record in the memory of the launcher, for a full disk; None without a launcher."""
    folder, name = environment.get(HEARTBEAT_VARIABLE), name or environment.get("TORCHELASTIC_RUN_ID")
    return Path(folder) / f"{name}-{rank}.failure" if folder and name else None


def failure_of(log: Path, environment: Mapping[str, str], rank: int, name: str) -> FailureRecord | None:
    """The record of a process from its log folder, or from memory where the disk of that is full.

    Args:
        log: its standard error.
        environment: environment of the launcher.
        rank: global rank.
        name: name of the round.
    """
    spare = _spare_path(environment, rank, name)
    return read_failure(log) or (None if spare is None else _read(spare))


def read_failure(log: Path) -> FailureRecord | None:
    """The record of the process with the standard error ``log``; None without one."""
    return _read(_record_path(log))


def _read(path: Path) -> FailureRecord | None:
    try:
        found = read_any_json(path)
        return FailureRecord(
            message=str(found["message"]), time_ns=int(found["time_ns"]), is_consequence=bool(found["is_consequence"])
        )
    except (DynmoError, KeyError, TypeError, ValueError, OverflowError):
        return None


@contextmanager
def recording_failure(
    environment: Mapping[str, str],
    is_consequence: Callable[[BaseException], bool] = lambda _: False,
    *,
    is_final: bool = True,
) -> Iterator[None]:
    """Record an exception for the launcher, and write its stack to the log of this process.

    Without a launcher, and for usage errors, which are reported by one rank, there is no effect.

    Args:
        environment: environment of the process.
        is_consequence: whether an error shows that another process failed.
        is_final: whether the process ends. One that may continue raises the error itself, and
            :func:`forget_failure` removes its record.

    Raises:
        SystemExit: in place of an exception that is not an error of ours, once its stack is in the log.
    """
    try:
        yield
    except Exception as error:
        if not is_launched(environment) or (isinstance(error, DynmoError) and error.exit_code == EXIT_USAGE):
            raise
        _record(environment, error, is_consequence=is_consequence(error))
        if not is_final:
            raise
        print_message(WITHHELD)
        if isinstance(error, DynmoError):
            raise
        print_message("".join(traceback.format_exception(error)).rstrip("\n"))
        raise SystemExit(EXIT_FAILURE) from None


def _record(environment: Mapping[str, str], error: Exception, *, is_consequence: bool) -> None:
    record = FailureRecord(message=error_line(error), time_ns=time.time_ns(), is_consequence=is_consequence)
    path, content = environment.get(_ERROR_FILE_VARIABLE), json.dumps(asdict(record)).encode()
    spare = _spare_path(environment, environment.get("RANK", "0"))
    if path:
        try:
            write_whole(_record_path(Path(path)), content)
        except OSError:
            with suppress(OSError):
                if spare is not None:
                    spare.write_bytes(content)


def forget_failure(environment: Mapping[str, str]) -> None:
    """Remove the record of a process that continues after an error: what ends it later has another cause."""
    spare = _spare_path(environment, environment.get("RANK", "0"))
    if path := environment.get(_ERROR_FILE_VARIABLE):
        for each in (_record_path(Path(path)), spare):
            with suppress(OSError):
                if each is not None:
                    each.unlink(missing_ok=True)


class QuietLines:
    """Standard error of rank 0 as the launcher prints it: up to the failure, and without C++ frames."""

    def __init__(self) -> None:
        self._rest, self._is_withheld = "", False

    def feed(self, text: str) -> str:
        """The part of ``text`` to print; an incomplete last line waits for its end."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(f"{line}\n" for line in lines if self._is_printed(line))

    def finish(self) -> str:
        """The incomplete last line."""
        rest, self._rest = self._rest, ""
        return rest if rest and self._is_printed(rest) else ""

    def _is_printed(self, line: str) -> bool:
        self._is_withheld = self._is_withheld or line == WITHHELD
        return not self._is_withheld and not is_cpp_frame(line)


def printed_text(log: str) -> str:
    """The part of a log of rank 0 that the launcher has printed."""
    quiet = QuietLines()
    return quiet.feed(log) + quiet.finish()


def withheld_text(log: str) -> str:
    """The stack at the end of a log; the whole log if it has no mark."""
    return log.partition(f"{WITHHELD}\n")[2] or log
