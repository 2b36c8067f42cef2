"""The ``incident`` record of ``events.jsonl``: what disturbed a run, where, why, and what it cost.

Rank 0 writes incidents of a running training; the launcher of node 0 writes those that end a round, once the processes
have ended. Seconds and steps add up over the records without overlap::

    checkpoint ------ steps ------ failure ------------ first step of the next round
               |<-- process_death, hang: work lost -->|<------ restart: pause ------>|

    copy of --peer-checkpoint-interval ------ failure ------ first step of the other ranks
               |<------------- continued: work lost and pause ------------->|

    copy of --peer-checkpoint-interval ------ other ranks join ------ first step of all ranks
               |<------------------------ growth: pause --------------------->|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

IncidentKind = Literal[
    "process_death",
    "node_loss",
    "hang",
    "restart",
    "continued",
    "growth",
    "slow_worker",
    "worker_recovered",
    "slow_step",
    "planner_restart",
    "not_finite",
    "migration_failed",
    "loss_spike",
    "rollback",
]
INCIDENT_KINDS: tuple[str, ...] = get_args(IncidentKind)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What disturbed a run.

    Attributes:
        incident: kind of the incident.
        message: one sentence for a person.
        cause: the cause as a phrase, without rank and host.
        step: number of completed steps when it happened.
        ranks: ranks that caused it; empty where it has no rank.
        hosts: their hosts.
        seconds_lost: time lost, in seconds; see the module for what each kind counts.
        steps_lost: completed steps that have to be repeated, or updates that were skipped.
        phase: what the first of the ranks did; empty where unknown.
        collective: collective that the other ranks were waiting in; empty where unknown.
        stacks: folder of the stacks of all ranks; empty without.
        skipped_samples: first training sample that is skipped from now on, and the one after the last; empty without.
    """

    incident: IncidentKind
    message: str
    cause: str
    step: int
    ranks: Sequence[int] = ()
    hosts: Sequence[str] = ()
    seconds_lost: float = 0.0
    steps_lost: int = 0
    phase: str = ""
    collective: str = ""
    stacks: str = ""
    skipped_samples: Sequence[int] = ()

    @property
    def detail(self) -> dict[str, Any]:
        """The fields of the record in addition to those of every event."""
        optional: dict[str, Any] = {"phase": self.phase, "collective": self.collective, "stacks": self.stacks}
        optional["skipped_samples"] = list(self.skipped_samples)
        return {
            "incident": self.incident,
            "cause": self.cause,
            "ranks": sorted(self.ranks),
            "hosts": list(dict.fromkeys(self.hosts)),
            "seconds_lost": round(max(0.0, self.seconds_lost), 3) if math.isfinite(self.seconds_lost) else 0.0,
            "steps_lost": max(0, self.steps_lost),
        } | {name: value for name, value in optional.items() if value}

    def record(self, moment: datetime) -> dict[str, Any]:
        """The line of ``events.jsonl``, dated ``moment``."""
        time_utc = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"time_utc": time_utc, "step": self.step, "kind": "incident", "message": self.message} | self.detail
