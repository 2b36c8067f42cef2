"""Interpret exit codes and logs of a run's processes: pure functions that find the cause of a failure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._common.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RELAUNCH, EXIT_TERMINATED, EXIT_USAGE
from .failure_record import FailureRecord, first_line, is_cpp_frame

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
        record: what the process recorded of its failure; None where it was killed, or had a usage error.
    """

    rank: int
    code: int
    log: str
    record: FailureRecord | None = None


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


def with_causal_codes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures of a node with exit codes that distinguish cause and consequence, as :func:`root_causes` needs.

    A rank that lost another one counts as terminated, if the cause is on this node, too. A rank that recorded its own
    error and was terminated before it could exit counts as failed.
    """

    def is_consequence(failure: Failure) -> bool:
        terminated = failure.record is None and failure.code in _TERMINATED_CODES
        return terminated or (failure.record is not None and failure.record.is_consequence)

    if all(map(is_consequence, failures)):
        return list(failures)
    causal = []
    for failure in failures:
        if is_consequence(failure):
            causal.append(replace(failure, code=EXIT_TERMINATED))
        elif failure.record is not None and failure.code in _TERMINATED_CODES:
            causal.append(replace(failure, code=EXIT_FAILURE))
        else:
            causal.append(failure)
    return causal


def error_of(failure: Failure, tail: Sequence[str]) -> str:
    """The error of a process in one line; empty if it was killed.

    Args:
        failure: the process.
        tail: the last lines of its log.
    """
    if failure.record is not None:
        return failure.record.message
    if failure.code < 0 and failure.code != -signal.SIGABRT:
        return ""
    lines = [line for line in tail if not is_cpp_frame(line)]
    return first_line(lines[-1].removeprefix("dynmo-train: error: ")) if lines else ""


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others: of :func:`root_causes`, the one that was recorded first."""
    roots = root_causes(failures)
    recorded = [failure for failure in roots if failure.record is not None and not failure.record.is_consequence]
    if not recorded or any(failure.record is None and failure.code < 0 for failure in roots):
        return roots[0]
    return min(recorded, key=lambda failure: (failure.record.time_ns if failure.record else 0, failure.rank))


def failure_message(failure: Failure, host: str, error: str) -> str:
    """One line on the failure that ended a round: rank, host, error and log.

    Args:
        failure: the first cause.
        host: host of the process.
        error: the error in one line; empty where it is unknown.
    """
    text = f": {error}" if error else ""
    return f"rank {failure.rank} {describe_exit(failure.code)} on {host}{text}; its log is {failure.log}"
