"""Worker times in the logs of Megatron and DeepSpeed, divided among the items of each worker.

Megatron (``--timing-log-level 2``) logs the time of all microbatches of a step. By ``--timing-log-option``, ``all``
has one line per rank, ``minmax`` the fastest and the slowest rank, and ``max`` the slowest. DeepSpeed
(``wall_clock_breakdown``) logs one line per microbatch, for the ranks that log. No log has times of layers, so a
worker's time is divided among its items in proportion to the analytic model. If a log has only the slowest rank, the
model is scaled so that its slowest worker takes that time. Workers that do not log are scaled like the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .._common.errors import UsageError
from ..formats.profile import Header

SLOWEST = -1
"""Used as a rank: the slowest of all ranks."""
KINDS = ("forward", "backward")
# Digits are bounded in number: a log is foreign text, and Python refuses to convert thousands of digits.
_MS = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_ITERATION = re.compile(r"\biteration\s+([0-9]{1,12})\s*/\s*[0-9]+\b")
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\): {_MS}\b")
# ``name ......: (min, max)`` with minmax, ``name ......: max`` with max; with all, ``name:`` and then a line per rank.
_TIMER = re.compile(rf"\b(forward|backward)-compute\b[ .]*:\s*(?:\({_MS}, {_MS}\)|{_MS})?\s*$")
_OTHER_TIMER = re.compile(r"(?:^|\s)[a-z][\w/-]*[ .]*:\s*(?:\([0-9., ]+\))?\s*$")
_RANK = re.compile(rf"\brank\s+([0-9]{{1,9}}): {_MS}\s*$")
# DeepSpeed's ``log_dist`` begins a line with the rank; a log that was filtered may lack it.
_DEEPSPEED = re.compile(
    rf"(?:\[Rank ([0-9]{{1,9}})\].*?)?time \(ms\) .*?\bfwd_microstep: {_MS}\b.*?\bbwd_microstep: {_MS}\b"
)


@dataclass(kw_only=True)
class LoggedStep:
    """The times of one step in ms, by kind and rank.

    Attributes:
        step: as logged; None if the log does not have it.
        elapsed_ms: of the whole step; None if the log does not have it.
        times: kind -> rank -> ms.
    """

    step: int | None = None
    elapsed_ms: float | None = None
    times: dict[str, dict[int, float]] = field(default_factory=dict)


def megatron_steps(text: str) -> Iterator[LoggedStep]:
    """The steps of a Megatron log that have forward and backward times."""
    now, kind = LoggedStep(), ""
    for line in text.splitlines():
        # Megatron logs the line of an iteration first, then its timers, already divided by ``--log-interval``.
        if iteration := _ITERATION.search(line):
            if now.times:
                yield now
            elapsed = _ELAPSED.search(line)
            now = LoggedStep(step=int(iteration[1]), elapsed_ms=float(elapsed[1]) if elapsed else None)
            kind = ""
        elif timer := _TIMER.search(line):
            kind = timer[1]
            # The same timer again without an iteration line, such as in a log filtered for timers: the next step.
            if kind in now.times:
                yield now
                now = LoggedStep()
            now.times[kind] = {}
            if slowest := timer[3] or timer[4]:
                now.times[kind][SLOWEST] = float(slowest)
                kind = ""
        elif (rank := _RANK.search(line)) and kind:
            now.times[kind][int(rank[1])] = float(rank[2])
        elif _OTHER_TIMER.search(line):
            kind = ""  # the ranks that follow are those of another timer
    if now.times:
        yield now


def deepspeed_steps(text: str) -> Iterator[LoggedStep]:
    """The microbatches of a DeepSpeed log: the n-th line of each rank is the n-th microbatch; no rank is rank 0."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for found in _DEEPSPEED.finditer(text):
        lines.setdefault(int(found[1] or 0), []).append((float(found[2]), float(found[3])))
    for at in range(max(map(len, lines.values()), default=0)):
        here = {rank: times[at] for rank, times in lines.items() if at < len(times)}
        yield LoggedStep(
            times={kind: {rank: times[index] for rank, times in here.items()} for index, kind in enumerate(KINDS)}
        )


def worker_times(times: Mapping[int, float], header: Header, source: str) -> dict[int, float]:
    """The time in ms of the slowest rank of each worker, by the worker's position in the header.

    Raises:
        UsageError: a rank belongs to no worker.
    """
    position = {rank: at for at, worker in enumerate(header.workers) for rank in worker.ranks}
    strange = sorted(rank for rank in times if rank not in position and rank != SLOWEST)
    if strange:
        raise UsageError(
            f"{source}: ranks {', '.join(map(str, strange))} belong to no worker of the header, whose ranks are"
            f" {min(position)} to {max(position)}; give the header of the run that wrote the log"
        )
    # The slowest rank: a pipeline rank ends with its last tensor- or data-parallel rank, as in a profile.
    found: dict[int, float] = {}
    for rank, time in times.items():
        if rank != SLOWEST:
            found[position[rank]] = max(time, found.get(position[rank], 0.0))
    return found


def spread(
    times: Mapping[int, float], slowest: float | None, workers_of_items: Sequence[int], model: Sequence[int]
) -> list[int]:
    """The time of each item in ns: a worker's time, divided among its items as in the model.

    Args:
        times: ns per microbatch of workers, by position; missing workers are scaled like the others.
        slowest: the time of the slowest worker, if that is all that is known.
        workers_of_items: the position of each item's worker.
        model: the modelled time of each item in ns.
    """
    modelled = [0] * (max(workers_of_items) + 1)
    for worker, ns in zip(workers_of_items, model, strict=True):
        modelled[worker] += ns
    if slowest is not None:
        usual = slowest / max(1, *modelled)
    else:
        usual = sum(times.values()) / max(1, sum(modelled[worker] for worker in times if worker < len(modelled)))
    scale = {at: times[at] / modelled[at] for at in times if at < len(modelled) and modelled[at]}
    return [round(ns * scale.get(worker, usual)) for worker, ns in zip(workers_of_items, model, strict=True)]
