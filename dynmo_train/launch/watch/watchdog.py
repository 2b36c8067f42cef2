"""Decides whether a rank hangs: a pure function of heartbeats, process states and settings.

A rank is late when its last beat is older than its deadline::

    3 x the median step, at least --hang-min-s       forward, backward, reduction, optimizer, boundaries
    --distributed-timeout-minutes                    data, evaluation, plan, migration, save; a step that compiles
    none                                             start of the run

and never later than ``--distributed-timeout-minutes``. A process that is stopped (SIGSTOP) has the first deadline in
every phase. Ranks wait for one another: a late rank that only waits is not blamed while any rank still has time. So a
slow save of one rank is not a hang, although the others wait for it in a collective.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .heartbeat import Heartbeat, Phase

# In these phases a rank may take long without being late.
SLOW_PHASES = frozenset((Phase.DATA, Phase.TECHNIQUE, Phase.EVALUATE, Phase.PLAN_WAIT, Phase.MIGRATE, Phase.SAVE))
# In these phases a rank waits for others most of the time.
WAITING_PHASES = frozenset((Phase.PIPELINE, Phase.REDUCTION, Phase.RESULT, Phase.BOUNDARY, Phase.PLAN_WAIT))
_NO_DEADLINE = (Phase.START, Phase.END)
STOPPED = ("T", "t")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+ in (?P<name>\S+)')
_WRAPPERS = ("wrapper", "_time_logger", "func_return", "inner")


@dataclass(frozen=True, kw_only=True)
class HangSettings:
    """When a rank is late.

    Attributes:
        factor: median step times without a beat; 0 disables the watchdog.
        min_s: minimum deadline, in seconds.
    """

    factor: float
    min_s: float


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank as its launcher sees it.

    Attributes:
        rank: global rank.
        host: its host.
        beat: its last heartbeat.
        age_s: seconds since that.
        process: state of the process, as in ``/proc``: R, S, D, T, Z; empty where unknown.
    """

    rank: int
    host: str
    beat: Heartbeat
    age_s: float
    process: str

    @property
    def is_stopped(self) -> bool:
        """Whether the process was stopped by a signal."""
        return self.process in STOPPED


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that hangs.

    Attributes:
        state: the rank.
        deadline_s: its deadline, in seconds.
        suspects: other late ranks, the oldest beat first.
    """

    state: RankState
    deadline_s: float
    suspects: tuple[RankState, ...] = ()

    @property
    def cause(self) -> str:
        """The cause as a phrase."""
        state = self.state
        if state.is_stopped:
            what = f"stopped (state {state.process}), during {state.beat.text}"
        elif state.process == "D":
            what = f"uninterruptible wait (state D), during {state.beat.text}"
        else:
            what = f"no progress during {state.beat.text}"
        return f"{what} for {state.age_s:.1f} s (deadline {self.deadline_s:.1f} s)"


def deadline_s(state: RankState, median_step_s: float, settings: HangSettings) -> float:
    """Seconds without a beat after which a rank is late.

    Args:
        state: the rank.
        median_step_s: median step time over the ranks, in seconds; 0 where unknown.
        settings: see :class:`HangSettings`.
    """
    beat, limit = state.beat, state.beat.limit_s or math.inf
    usual = min(limit, max(settings.min_s, settings.factor * median_step_s))
    if state.is_stopped and median_step_s:
        return usual
    if beat.phase in _NO_DEADLINE:
        return math.inf
    return limit if beat.phase in SLOW_PHASES or beat.is_cold or not median_step_s else usual


def find_hang(states: Sequence[RankState], settings: HangSettings, *, num_unknown: int = 0) -> Hang | None:
    """The rank that hangs; None while no rank does.

    Args:
        states: running ranks with a heartbeat.
        settings: see :class:`HangSettings`.
        num_unknown: number of ranks without a heartbeat, which may still hold up the others.
    """
    if not settings.factor or not states:
        return None
    median_step_s = max(state.beat.median_step_s for state in states)
    deadlines = {state.rank: deadline_s(state, median_step_s, settings) for state in states}
    late = [state for state in states if state.age_s > deadlines[state.rank]]
    causes = [state for state in late if state.is_stopped or state.beat.phase not in WAITING_PHASES]
    if not causes and not num_unknown and len(late) == len(states):
        causes = late
    if not causes:
        return None
    order = sorted(causes, key=lambda state: (not state.is_stopped, -state.age_s, state.rank))
    others = sorted((state for state in late if state is not order[0]), key=lambda state: -state.age_s)
    return Hang(state=order[0], deadline_s=deadlines[order[0].rank], suspects=tuple(others))


def collective_in(stack: str) -> str:
    """The collective that a stack is blocked in, as ``all_reduce in sum_over_pipeline``; empty without one.

    Args:
        stack: output of faulthandler, innermost frame first.
    """
    # The main thread is the last one that faulthandler writes.
    main = re.split(r"\n(?=(?:Current thread|Thread) )", stack.strip())[-1]
    frames = [(match["file"], match["name"]) for match in _FRAME.finditer(main)]
    if not frames:
        return ""
    file, name = frames[0]
    if not ("/torch/distributed/" in file or "wait" in name or "synchronize" in name):
        return ""
    name = next((each for _, each in frames if each not in _WRAPPERS), name)
    callers = (each for file, each in frames[1:] if "/torch/" not in file and not file.endswith("/contextlib.py"))
    caller = next(callers, None)
    return name if caller is None else f"{name} in {caller}"


def refine(hang: Hang, collectives: Mapping[int, str]) -> tuple[Hang, str]:
    """The rank that hangs, by the stacks, and the collective in which the others wait.

    A late rank that is outside of all collectives holds up those that are inside one.

    Args:
        hang: by the heartbeats alone.
        collectives: rank to :func:`collective_in` of its stack; ranks without a stack are missing.
    """
    chosen = hang.state
    if not chosen.is_stopped and collectives.get(chosen.rank):
        outside = [state for state in hang.suspects if not collectives.get(state.rank, "unknown")]
        if outside:
            others = [hang.state, *(state for state in hang.suspects if state is not outside[0])]
            hang = Hang(state=outside[0], deadline_s=hang.deadline_s, suspects=tuple(others))
    names = [name for rank, name in sorted(collectives.items()) if name and rank != hang.state.rank]
    return hang, max(dict.fromkeys(names), key=names.count) if names else collectives.get(hang.state.rank, "")
