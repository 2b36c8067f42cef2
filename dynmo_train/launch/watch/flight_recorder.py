"""Torch's flight recorder: the last collectives of each rank, read when a rank hangs.

torch keeps the last collectives of a process in memory. A thread of the process writes them on request, also while the
main thread is blocked in one::

    launcher   request_trace --> NAME-RANK.request, a named pipe
    worker     thread of serve_traces --> NAME-RANK.trace, JSON of torch
    launcher   parse_trace of all ranks --> absent_ranks: which ranks did not enter which collective

It is on where NCCL is used. gloo's collectives are recorded, too, but each then takes 0.15 ms more processor time, in
which torch records the Python stack: there only the environment turns it on.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._common.document import parse_any_json

# Number of collectives that torch keeps: the name of torch 2.8 and later, and the older one.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
NUM_ENTRIES = 2000
NO_RECORDER = "no flight recorder on gloo; TORCH_FR_BUFFER_SIZE=2000 records its collectives, at 0.15 ms each"


@dataclass(frozen=True, kw_only=True)
class LastCollective:
    """The last collective of a process group that a rank entered.

    Attributes:
        number: its number in the group, from 1.
        name: such as ``nccl:all_reduce``.
        sizes: shapes of its inputs.
        members: ranks of the group; empty where torch does not name them.
    """

    number: int
    name: str
    sizes: str
    members: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AbsentRanks:
    """Ranks that did not enter a collective that others wait in.

    Attributes:
        group: name of the process group.
        ranks: the ranks.
        waiting: ranks that entered it.
        collective: the collective.
    """

    group: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    collective: LastCollective

    @property
    def text(self) -> str:
        """The finding as a sentence without a full stop."""
        of_all = f"rank{'s'[: len(self.ranks) != 1]} {', '.join(map(str, self.ranks))} did not enter"
        waiting = f"rank{'s'[: len(self.waiting) != 1]} {', '.join(map(str, self.waiting))}"
        collective = self.collective
        return (
            f"{of_all} {collective.name} number {collective.number:,} of group {self.group}"
            f" (sizes {collective.sizes}), which {waiting} entered"
        )


def enable_recorder(environment: MutableMapping[str, str], device_type: str) -> None:
    """Let torch record the collectives of this process; before the first process group.

    Args:
        environment: environment of the process; a size in it is not changed.
        device_type: ``cuda`` or ``cpu``.
    """
    if device_type == "cuda" and not any(name in environment for name in SIZE_VARIABLES):
        environment.update(dict.fromkeys(SIZE_VARIABLES, str(NUM_ENTRIES)))


def is_recording(environment: Mapping[str, str]) -> bool:
    """Whether torch records the collectives of this process."""
    return any(environment.get(name, "0") not in ("", "0") for name in SIZE_VARIABLES)


def request_path(folder: Path, name: str, rank: int) -> Path:
    """The named pipe by which a launcher asks a rank for its trace in the round ``name``."""
    return folder / f"{name}-{rank}.request"


def trace_path(folder: Path, name: str, rank: int) -> Path:
    """The file that a rank's trace is written to."""
    return folder / f"{name}-{rank}.trace"


def serve_traces(folder: Path, name: str, rank: int) -> threading.Thread:
    """Start the thread that writes the trace of this process whenever a launcher asks for it.

    It waits in the open of a named pipe, without processor time, and ends with the process.

    Args:
        folder: folder of the heartbeats.
        name: name of the round.
        rank: rank of this process.
    """
    pipe = request_path(folder, name, rank)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
    thread = threading.Thread(target=_serve, args=(pipe, trace_path(folder, name, rank)), daemon=True)
    thread.start()
    return thread


def _serve(pipe: Path, trace: Path) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # private, not in the stubs

    # The folder is removed at the end of the round.
    with contextlib.suppress(OSError):
        while True:
            with pipe.open("rb") as requests:
                requests.read()
            partial = trace.with_suffix(".partial")
            partial.write_bytes(_dump_fr_trace_json())
            partial.replace(trace)


def request_trace(folder: Path, name: str, rank: int) -> bool:
    """Ask a rank for its trace; whether it has a thread that answers."""
    try:
        descriptor = os.open(request_path(folder, name, rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no pipe, or nobody reads it
        return False
    os.close(descriptor)
    return True


def parse_trace(text: str | bytes) -> dict[str, LastCollective]:
    """The last collective of each process group in a trace of torch; empty where nothing was recorded.

    Args:
        text: JSON that torch wrote.
    """
    try:
        document = parse_any_json(text)
        entries = [each for each in document.get("entries", ()) if not each["is_p2p"]]
        members = {group: _members(each) for group, each in document.get("pg_config", {}).items()}
        last: dict[str, dict[str, Any]] = {}
        for entry in entries:
            group = str(entry["process_group"][0])
            if group not in last or entry["collective_seq_id"] > last[group]["collective_seq_id"]:
                last[group] = entry
        return {
            group: LastCollective(
                number=int(entry["collective_seq_id"]),
                name=str(entry["profiling_name"]),
                sizes=str(entry["input_sizes"]),
                members=members.get(group, ()),
            )
            for group, entry in last.items()
        }
    # A trace of another version of torch: the stacks name the collective, too.
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, SyntaxError):
        return {}


def _members(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks of a group, which torch writes as a list in a string."""
    return tuple(int(rank) for rank in ast.literal_eval(config["ranks"]))


def absent_ranks(traces: Mapping[int, Mapping[str, LastCollective]]) -> list[AbsentRanks]:
    """The ranks that did not enter the last collective of their group, one finding for each group.

    A rank without a trace, such as a stopped one, is absent from the groups that torch names it a member of.

    Args:
        traces: rank -> :func:`parse_trace` of its trace.
    """
    found = []
    for group in sorted({group for trace in traces.values() for group in trace}):
        numbers = {rank: trace[group].number for rank, trace in traces.items() if group in trace}
        furthest = max(numbers.values())
        waiting = tuple(sorted(rank for rank, number in numbers.items() if number == furthest))
        collective = traces[waiting[0]][group]
        absent = tuple(sorted({*numbers, *collective.members} - {*waiting}))
        if absent:
            found.append(AbsentRanks(group=group, ranks=absent, waiting=waiting, collective=collective))
    return found
