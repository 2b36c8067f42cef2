"""Interpret exit codes and logs of a run's processes: pure functions that find the cause of a failure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._common.errors import EXIT_INTERRUPTED, EXIT_RELAUNCH, EXIT_TERMINATED, EXIT_USAGE

TAIL_LINES = 12
# The loss or gradients are not finite. A restart from the same checkpoint would compute the same.
EXIT_NOT_FINITE = 3
PERMANENT_CODES = (EXIT_USAGE, EXIT_NOT_FINITE)
_TERMINATED_CODES = (EXIT_TERMINATED, -signal.SIGTERM, EXIT_INTERRUPTED, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed process.

    Attributes:
        rank: global rank.
        code: exit code; negative for the signal that killed it.
        log: path of its standard error.
    """

    rank: int
    code: int
    log: str


def _severity(failure: Failure) -> int:
    """Order of failures by the likelihood that they caused the others; 0 is most likely."""
    if failure.code == EXIT_RELAUNCH:
        return 0
    if failure.code == EXIT_USAGE:
        return 1
    if failure.code in _TERMINATED_CODES:
        return 4
    return 2 if failure.code < 0 else 3


def root_causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that most likely caused the others, by rank.

    A killed process precedes one that exited with an error, because its peers fail when it disappears. Processes that
    were terminated by SIGTERM or SIGINT come last.
    """
    first = min(map(_severity, failures))
    return sorted((failure for failure in failures if _severity(failure) == first), key=lambda failure: failure.rank)


def shell_exit_code(code: int) -> int:
    """The exit code as a shell reports it: 128 + s for signal s."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """A phrase for the exit code of a process."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(text: str, count: int = TAIL_LINES) -> list[str]:
    """The last ``count`` nonblank lines."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def usage_message(tail: Sequence[str]) -> str:
    """The message of a usage error at the end of a log; empty if there is none."""
    starts = [number for number, line in enumerate(tail) if line.startswith("dynmo-train: error: ")]
    return "\n".join(tail[starts[0] :]) if starts else ""


def failure_message(failures: Sequence[Failure], tails: Mapping[int, Sequence[str]]) -> str:
    """One message for all failures of a round.

    Args:
        failures: at least one failure.
        tails: rank to the last lines of its log, for ranks whose log was not printed.
    """
    root = root_causes(failures)
    lines, printed = [], set()
    for failure in root:
        lines.append(f"rank {failure.rank} {describe_exit(failure.code)}; its log is {failure.log}")
        tail = tuple(tails.get(failure.rank, ()))
        if tail not in printed:
            lines += [f"  | {line}" for line in tail]
            printed.add(tail)
    others = sorted(failure.rank for failure in failures if failure not in root)
    if others:
        lines.append(f"also failed: rank {', '.join(map(str, others))}")
    return "\n".join(lines)
