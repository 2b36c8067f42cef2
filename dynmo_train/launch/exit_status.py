"""What the ends of a run's processes mean: pure functions from exit codes and logs to one verdict."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._common.errors import EXIT_INTERRUPTED, EXIT_RELAUNCH, EXIT_TERMINATED, EXIT_USAGE

TAIL_LINES = 12
# A run whose model is not finite. Another start from the same checkpoint would compute the same.
EXIT_NOT_FINITE = 3
LASTING = (EXIT_USAGE, EXIT_NOT_FINITE)
_CALLED_OFF = (EXIT_TERMINATED, -signal.SIGTERM, EXIT_INTERRUPTED, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One process that ended badly: its rank, its exit code (negative: the signal that killed it), its log."""

    rank: int
    code: int
    log: str


def _severity(failure: Failure) -> int:
    """How likely a failure is the cause of the others: 0 is likeliest."""
    if failure.code == EXIT_RELAUNCH:
        return 0
    if failure.code == EXIT_USAGE:
        return 1
    if failure.code in _CALLED_OFF:
        return 4
    return 2 if failure.code < 0 else 3


def causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that are likeliest causes, by rank; the others followed from them.

    A process that was killed goes before one that failed by itself, whose peers it took with it; processes that were
    told to end come last.
    """
    first = min(map(_severity, failures))
    return sorted((failure for failure in failures if _severity(failure) == first), key=lambda failure: failure.rank)


def shell_code(code: int) -> int:
    """The exit code as a shell would report it: a signal ``s`` is 128 + s."""
    return 128 - code if code < 0 else code


def end_text(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(text: str, count: int = TAIL_LINES) -> list[str]:
    """The last ``count`` lines that hold anything."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def usage_words(tail: Sequence[str]) -> str:
    """The message of a usage error at the end of a log; empty where it holds none."""
    begins = [number for number, line in enumerate(tail) if line.startswith("dynmo-train: error: ")]
    return "\n".join(tail[begins[0] :]) if begins else ""


def failure_message(failures: Sequence[Failure], tails: Mapping[int, Sequence[str]]) -> str:
    """One message on all failures of a start.

    Args:
        failures: at least one.
        tails: rank to the last lines of its log, for ranks whose log has not been shown.
    """
    root = causes(failures)
    lines, told = [], set()
    for failure in root:
        lines.append(f"rank {failure.rank} {end_text(failure.code)}; its log is {failure.log}")
        tail = tuple(tails.get(failure.rank, ()))
        if tail not in told:
            lines += [f"  | {line}" for line in tail]
            told.add(tail)
    others = sorted(failure.rank for failure in failures if failure not in root)
    if others:
        lines.append(f"with it ended rank {', '.join(map(str, others))}")
    return "\n".join(lines)
