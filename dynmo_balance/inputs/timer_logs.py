"""Times of workers in the logs of Megatron and DeepSpeed, put onto the items that the workers hold.

Megatron (``--timing-log-level 2``) logs the time of all microbatches of a step in the forms of
``--timing-log-option``: ``all`` is a line for each rank, ``minmax`` the fastest and the slowest rank, ``max`` the
slowest. DeepSpeed (``wall_clock_breakdown``) logs a line for each microbatch of the ranks that log. No log has times of
layers: a worker's time is shared among its items in proportion to the analytic model. Where a log has the slowest rank
alone, the model as a whole is scaled so that its slowest worker takes that time; workers that do not log are scaled as
those that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .._common.errors import UsageError
from ..formats.profile import Header

SLOWEST = -1
"""In place of a rank: the slowest of all."""
KINDS = ("forward", "backward")
_MS = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_ITERATION = re.compile(r"\biteration\s+([0-9]{1,12})\s*/\s*[0-9]+\b")
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\): {_MS}\b")
_TIMER = re.compile(rf"\b(forward|backward)-compute\b[ .]*:\s*(?:\({_MS}, {_MS}\)|{_MS})?\s*$")
_OTHER_TIMER = re.compile(r"(?:^|\s)[a-z][\w/-]*[ .]*:\s*(?:\([0-9., ]+\))?\s*$")
_RANK = re.compile(rf"\brank\s+([0-9]{{1,9}}): {_MS}\s*$")
_DEEPSPEED = re.compile(
    rf"(?:\[Rank ([0-9]{{1,9}})\].*?)?time \(ms\) .*?\bfwd_microstep: {_MS}\b.*?\bbwd_microstep: {_MS}\b"
)


@dataclass(kw_only=True)
class LoggedStep:
    """The times of one step in ms, by kind and rank.

    Attributes:
        step: as logged; None where the log does not say it.
        elapsed_ms: of the whole step, None where the log does not say it.
    """

    step: int | None = None
    elapsed_ms: float | None = None
    times: dict[str, dict[int, float]] = field(default_factory=dict)


def megatron_steps(text: str) -> Iterator[LoggedStep]:
    """The steps of a Megatron log that have forward and backward times."""
    now, kind = LoggedStep(), ""
    for line in text.splitlines():
        if iteration := _ITERATION.search(line):
            if now.times:
                yield now
            elapsed = _ELAPSED.search(line)
            now = LoggedStep(step=int(iteration[1]), elapsed_ms=float(elapsed[1]) if elapsed else None)
            kind = ""
        elif timer := _TIMER.search(line):
            kind = timer[1]
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
            kind = ""
    if now.times:
        yield now


def deepspeed_steps(text: str) -> Iterator[LoggedStep]:
    """The microbatches of a DeepSpeed log: the n-th line of each rank is of the n-th; without a rank it is rank 0's."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for found in _DEEPSPEED.finditer(text):
        lines.setdefault(int(found[1] or 0), []).append((float(found[2]), float(found[3])))
    for at in range(max(map(len, lines.values()), default=0)):
        here = {rank: times[at] for rank, times in lines.items() if at < len(times)}
        yield LoggedStep(
            times={kind: {rank: times[index] for rank, times in here.items()} for index, kind in enumerate(KINDS)}
        )


def worker_times(times: Mapping[int, float], header: Header, source: str) -> dict[int, float]:
    """The slowest rank of each worker, by the worker's position in the header."""
    position = {rank: at for at, worker in enumerate(header.workers) for rank in worker.ranks}
    strange = sorted(rank for rank in times if rank not in position and rank != SLOWEST)
    if strange:
        raise UsageError(
            f"{source}: ranks {', '.join(map(str, strange))} belong to no worker of the header, whose ranks are"
            f" {min(position)} to {max(position)}; give the header of the run that wrote the log"
        )
    found: dict[int, float] = {}
    for rank, time in times.items():
        if rank != SLOWEST:
            found[position[rank]] = max(time, found.get(position[rank], 0.0))
    return found


def spread(times: Mapping[int, float], slowest: float | None, holder: Sequence[int], model: Sequence[int]) -> list[int]:
    """The time of each item in ns: a worker's time, shared among its items as the model has them.

    Args:
        times: of workers by position, in ns of a microbatch; those that are missing go by the others.
        slowest: the time of the slowest worker, where that is all that is known.
        holder: of each item the position of its worker.
        model: of each item the modelled time.
    """
    modelled = [0] * (max(holder) + 1)
    for worker, ns in zip(holder, model, strict=True):
        modelled[worker] += ns
    if slowest is not None:
        usual = slowest / max(1, *modelled)
    else:
        usual = sum(times.values()) / max(1, sum(modelled[worker] for worker in times if worker < len(modelled)))
    scale = {at: times[at] / modelled[at] for at in times if at < len(modelled) and modelled[at]}
    return [round(ns * scale.get(worker, usual)) for worker, ns in zip(holder, model, strict=True)]
