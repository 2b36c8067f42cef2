"""``dynmo-plan watch``: the online planner."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .._common.document import MAX_COUNT, MAX_RANKS, MAX_STEPS
from .._common.option_groups import grouped
from .._common.panel import Panel
from .options import (
    BalancerOption,
    GranularityOption,
    LimitOptions,
    Objective,
    ObjectiveOption,
    Policy,
)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When a better partition is worth moving to."""

    PANEL: ClassVar[str] = "Decision"

    policy: Annotated[
        Policy,
        typer.Option(
            help="never; always: whenever the balancer's partition differs; threshold: when the gain over the horizon"
            " exceeds the pause; regret: when the regret so far, measured out of sample, exceeds the pause."
        ),
    ] = Policy.THRESHOLD
    min_gain: Annotated[float, typer.Option(min=0.0, max=1.0, help="Minimum gain, as a share of the step time.")] = 0.02
    margin: Annotated[float, typer.Option(min=0.0, help="regret: move at this share of the pause.")] = 0.5


@dataclass(frozen=True, kw_only=True)
class CadenceOptions:
    """How many records a decision uses, and how often decisions are made."""

    PANEL: ClassVar[Panel] = Panel("Cadence", rare=True)

    window: Annotated[
        int, typer.Option(min=1, max=MAX_STEPS, help="Number of step records; costs are their median.")
    ] = 8
    min_records: Annotated[
        int,
        typer.Option(min=1, max=MAX_STEPS, help="Minimum number of step records after a cost change, before deciding."),
    ] = 3
    every: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps between decisions.")] = 5
    horizon: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_STEPS, help="Steps that a plan is expected to last, unless the profile announces less."
        ),
    ] = 200


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """Whether workers are released."""

    PANEL: ClassVar[str] = "Release of workers"

    pack_to: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_RANKS, help="Release workers down to N, as soon as memory allows."),
    ] = None
    min_throughput_fraction: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Release workers as long as this share of the throughput is kept."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Whether experts move."""

    PANEL: ClassVar[Panel] = Panel("Experts", rare=True)

    experts: Annotated[
        bool, typer.Option("--experts", help="Move experts between the ranks that share them, by the same plans.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How the process runs and ends."""

    PANEL: ClassVar[Panel] = Panel("Process", rare=True)

    lockstep: Annotated[bool, typer.Option("--lockstep", help="Decide only on the trainer's plan requests.")] = False
    once: Annotated[bool, typer.Option("--once", help="Read the profile, decide once, and exit.")] = False
    poll_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Milliseconds between polls. Default: 50, in lockstep 4.")
    ] = None
    parent_pid: Annotated[int | None, typer.Option(min=1, max=MAX_COUNT, help="Exit when this process has ended.")] = (
        None
    )
    heartbeat_s: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds between heartbeat lines on stdout. Default: no heartbeat."),
    ] = None


@grouped
def watch(
    *,
    run: Annotated[Path, typer.Argument(help="Run directory; may still be empty.")],
    policy: PolicyOptions,
    balancer: BalancerOption = "exact",
    objective: ObjectiveOption = Objective.AUTO,
    granularity: GranularityOption = None,
    limits: LimitOptions,
    cadence: CadenceOptions,
    release: ReleaseOptions,
    experts: ExpertOptions,
    process: ProcessOptions,
) -> None:
    """Follow the profile of a run and write a plan when it is worth moving.

    Reads RUN/profile.jsonl and RUN/plans, writes only RUN/plans. Each plan is based on the active plan. Every plan
    request is answered, if necessary with a plan that keeps the partition. No second plan is written while one has no
    result. Each decision is one line on stderr. After a restart it resumes from these two places.
    """
    from ..inputs.problem_from_options import parse_bytes
    from ..online.decision import WatchOptions
    from ..online.policies import PolicySettings
    from ..online.watch import Heartbeat
    from ..online.watch import watch as follow

    options = WatchOptions(
        balancer=balancer,
        policy=policy.policy.value,
        granularity=None if granularity is None else granularity.value,
        objective=objective.value,
        settings=PolicySettings(min_gain=policy.min_gain, margin=policy.margin),
        **vars(cadence),
        **vars(release),
        **vars(experts),
        min_layers=limits.min_layers,
        memory_bytes=None if limits.memory is None else parse_bytes(limits.memory),
        lockstep=process.lockstep,
    )
    # In lockstep the trainer is paused until the planner answers, so a poll delays every request. Otherwise a plan is
    # worth whole steps, and a poll without news costs one stat().
    default_ms = 4.0 if process.lockstep else 50.0
    follow(
        run,
        options,
        once=process.once,
        poll_s=(process.poll_ms or default_ms) / 1000,
        parent_pid=process.parent_pid,
        # stdout is a pipe of the trainer, which reads the lines; data of this command are the plans on disk.
        heartbeat=None if process.heartbeat_s is None else Heartbeat(sys.stdout.fileno(), process.heartbeat_s),
    )
