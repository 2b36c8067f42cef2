"""Print why a round failed, once for all processes of a node."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from .._common.console import print_message
from .._common.errors import EXIT_USAGE
from .exit_status import (
    Failure,
    error_of,
    failure_message,
    first_cause,
    last_lines,
    root_causes,
    usage_message,
)
from .failure_record import printed_text, withheld_text


def report_failures(failures: Sequence[Failure], *, has_rank0: bool, is_verbose: bool = False) -> None:
    """Print the first cause of a failed round once, without lines that the log of rank 0 has already shown.

    A usage error of all ranks is printed once. If rank 0 was terminated before it could print the error, the message of
    another rank is printed.

    Args:
        failures: failures of this node.
        has_rank0: whether rank 0 runs on this node, which has printed its log.
        is_verbose: whether to print the stack, too.
    """
    logs = {f.rank: _text_of(Path(f.log)) for f in failures}
    log_of_first = Path(failures[0].log).parents[1] / "0" / "stderr.log"
    printed = printed_text(_text_of(log_of_first)) if has_rank0 else ""
    shown = {line.rstrip() for line in printed.splitlines()}
    tails = {rank: last_lines(log) for rank, log in logs.items()}
    roots = root_causes(failures)
    if roots[0].code == EXIT_USAGE:
        messages = [usage_message(tails[f.rank]) for f in roots if not shown.issuperset(tails[f.rank])]
        if all(messages):
            for message in dict.fromkeys(messages):
                print_message(message)
            return
    cause = first_cause(failures)
    error = error_of(cause, tails[cause.rank])
    message = failure_message(cause, socket.gethostname(), "" if f"dynmo-train: error: {error}" in shown else error)
    print_message(f"dynmo-train: error: {message}")
    if is_verbose and not (has_rank0 and cause.rank == 0):
        for line in withheld_text(logs[cause.rank]).splitlines():
            print_message(f"  | {line}")


def _text_of(log: Path) -> str:
    """The text of a log; empty if it cannot be read, as in a folder that has vanished."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
