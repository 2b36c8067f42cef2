"""Growth in place: a node joins a round that makes copies in memory, while the other ranks keep their processes.

Training continues until the ranks of the node are prepared. Each *attempt* has a number; its keys are in the store of
the round, with the prefix ``continuation``::

    node 0                       joining node                  joining ranks             rank 0 of the generation
    growth/K (store of        --> starts its processes     --> import, compare options
    the launch)                                                prepared/A/RANK: options
    proposal/A: Proposal     <-----------------------------'
          '--------------------------------------------------------------------------->  refused/A, different/A: why
                                                                                         not these sizes, this node; or
                                                                                         at the next copy boundary:
                                                               present/A/RANK        <-- boundary/A
    next/G+1: Notice         <-----------------------------'
    outcome/A: Notice        ------------------------------->  enter generation G+1      leave generation G, enter G+1
                             or the reason of a cancellation:  exit                      train on

Node 0 alone decides (:func:`next_action`), once per attempt. All ranks have completed a copy when ``boundary/A`` is
set, and none has changed anything: if the attempt is cancelled, they train on. ``present`` is an answer to
``boundary``, so that a node which died while the others waited for the boundary is not taken in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ..._common.checks import array, integer, mapping, nullable, obj, string
from ..._common.document import Problem
from ..store_values import decode_value
from .continuation import Notice, decode_notice, encode_notice

# Set by the launcher of a node that joins: what its ranks know before they take part.
JOINING_VARIABLE = "DYNMO_JOINING"
# Seconds for the ranks of a joining node to prepare, and to answer at the boundary.
PREPARE_S, PRESENT_S = 600.0, 5.0
_PROPOSAL = obj({"attempt": integer(1), "ranks": array(integer(), 1), "processes": integer(1), "workers": integer(1)})
_JOINING = obj({"attempt": integer(1), "run_dir": string()})
_OUTCOME = obj({"notice": nullable(string()), "reason": nullable(string())})


def _text(value: Any, path: str, problems: list[Problem]) -> None:
    """Any text, also an empty one."""
    if not isinstance(value, str):
        problems.append(Problem(path, "type", "must be a string"))


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The generation that node 0 proposes to the ranks that train.

    Attributes:
        attempt: number of the attempt.
        ranks: ranks that join, by their ranks in the round.
        processes: number of ranks of the new generation.
        workers: number of its pipeline ranks.
    """

    attempt: int
    ranks: tuple[int, ...]
    processes: int
    workers: int


def encode_proposal(proposal: Proposal) -> str:
    """The value of a proposal in the store."""
    return json.dumps(asdict(proposal))


def decode_proposal(value: bytes) -> Proposal:
    """The inverse of :func:`encode_proposal`.

    Raises:
        DocumentError: it is not a proposal of this version.
    """
    found = decode_value(value, _PROPOSAL, "a proposal")
    return Proposal(**found | {"ranks": tuple(found["ranks"])})


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What a rank of a joining node knows before it takes part.

    Attributes:
        attempt: number of the attempt.
        run_dir: run directory.
    """

    attempt: int
    run_dir: str

    @staticmethod
    def of(environment: Mapping[str, str]) -> Joining | None:
        """That of a process; None for one that is not of a joining node."""
        value = environment.get(JOINING_VARIABLE)
        return None if value is None else Joining(**decode_value(value, _JOINING, JOINING_VARIABLE))

    def encode(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        notice: the next generation; None where the attempt was cancelled.
        reason: why it was cancelled.
    """

    notice: Notice | None
    reason: str = ""


def encode_outcome(outcome: Outcome) -> str:
    """The value of an outcome in the store."""
    notice = None if outcome.notice is None else encode_notice(outcome.notice)
    return json.dumps({"notice": notice, "reason": outcome.reason or None})


def decode_outcome(value: bytes) -> Outcome:
    """The inverse of :func:`encode_outcome`.

    Raises:
        DocumentError: it is not an outcome of this version.
    """
    found = decode_value(value, _OUTCOME, "an outcome")
    notice = None if found["notice"] is None else decode_notice(found["notice"].encode())
    return Outcome(notice=notice, reason=found["reason"] or "")


def decode_properties(value: bytes) -> dict[str, str]:
    """The properties of a rank that joins, which must be equal on all ranks; name -> readable value.

    Raises:
        DocumentError: they are not those of this version.
    """
    return dict(decode_value(value, mapping(_text), "the properties of a rank"))


class Action(StrEnum):
    """What node 0 does next in an attempt."""

    WAIT = "wait"
    PROPOSE = "propose"
    GROW = "grow"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True)
class GrowthState:
    """What node 0 knows of an attempt.

    Attributes:
        ranks: ranks that join.
        is_training: whether the generation that the attempt began in trains, with all its ranks.
        has_finished: whether a rank of it has finished the run.
        left: names of joining nodes that were lost, drained or replaced.
        ended: ranks that join whose processes have ended.
        prepared: ranks that are prepared.
        refusal: why the running ranks refuse the proposal; None without a refusal.
        is_proposed: whether the proposal was made.
        is_at_boundary: whether the running ranks have completed a copy, and wait.
        present: ranks that have answered at the boundary.
        waited_s: seconds since the attempt began.
        waited_at_boundary_s: seconds since the boundary.
    """

    ranks: tuple[int, ...]
    is_training: bool = True
    has_finished: bool = False
    left: tuple[str, ...] = ()
    ended: Collection[int] = ()
    prepared: Collection[int] = ()
    refusal: str | None = None
    is_proposed: bool = False
    is_at_boundary: bool = False
    present: Collection[int] = ()
    waited_s: float = 0.0
    waited_at_boundary_s: float = 0.0


def next_action(state: GrowthState) -> tuple[Action, str]:
    """What node 0 does next, and the reason of a cancellation.

    Args:
        state: the attempt.
    """
    if (reason := _obstacle(state)) is not None:
        return Action.CANCEL, reason
    if not state.is_proposed:
        return (Action.PROPOSE if set(state.ranks) <= set(state.prepared) else Action.WAIT), ""
    if state.is_at_boundary and set(state.ranks) <= set(state.present):
        return Action.GROW, ""
    return Action.WAIT, ""


def _obstacle(state: GrowthState) -> str | None:
    """Why the attempt is cancelled; None while it may succeed."""
    ranks = ", ".join(map(str, sorted(set(state.ended) & set(state.ranks))))
    if not state.is_training:
        return "other ranks were lost at the same time"
    if state.has_finished:
        return "the run is at its end"
    if state.left:
        return f"{', '.join(state.left)} left before it joined"
    if ranks:
        return f"the process of rank {ranks} ended before it joined"
    if state.refusal is not None:
        return state.refusal
    if not state.is_proposed and state.waited_s > PREPARE_S:
        return f"its processes were not ready within {PREPARE_S:g} s"
    is_absent = not set(state.ranks) <= set(state.present)
    if state.is_at_boundary and is_absent and state.waited_at_boundary_s > PRESENT_S:
        return f"its processes did not answer within {PRESENT_S:g} s"
    return None
