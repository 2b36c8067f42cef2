"""``dynmo-plan watch``: the online planner."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .._common.document import MAX_COUNT, MAX_RANKS, MAX_STEPS
from .options import (
    Balancer,
    BalancerOption,
    GranularityOption,
    MemoryOption,
    MinLayersOption,
    Objective,
    ObjectiveOption,
    Policy,
)


def watch(
    run: Annotated[Path, typer.Argument(help="The run directory; it may be empty yet.")],
    policy: Annotated[
        Policy,
        typer.Option(
            help="never; always: whatever the balancer says; threshold: where the gain over the horizon outweighs the"
            " pause; regret: when the gain missed so far, measured out of sample, outweighs the pause."
        ),
    ] = Policy.THRESHOLD,
    balancer: BalancerOption = Balancer.EXACT,
    objective: ObjectiveOption = Objective.AUTO,
    granularity: GranularityOption = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    min_gain: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least gain, as a share of the step time.")] = 0.02,
    margin: Annotated[float, typer.Option(min=0.0, help="regret: move at this share of the pause.")] = 0.5,
    window: Annotated[
        int, typer.Option(min=1, max=MAX_STEPS, help="Step records that the costs are the median of.")
    ] = 8,
    min_records: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_STEPS, help="Step records since the last change of costs before anything is decided."
        ),
    ] = 3,
    every: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps between decisions.")] = 5,
    horizon: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_STEPS, help="Steps that a plan is expected to hold; less where the profile says so."
        ),
    ] = 200,
    pack_to: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_RANKS, help="Release workers until N are left, as soon as memory allows."),
    ] = None,
    min_throughput_fraction: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Release workers as long as this share of the throughput is kept."),
    ] = None,
    lockstep: Annotated[bool, typer.Option("--lockstep", help="Decide only when the trainer asks.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Read what is there, decide, and end.")] = False,
    poll_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Milliseconds between looks. Default: 50, in lockstep 4.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(min=1, max=MAX_COUNT, help="End when this process is gone.")] = None,
    heartbeat_s: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds between heartbeat lines on standard output; none writes none."),
    ] = None,
) -> None:
    """Follow a run's profile and write a plan when it pays.

    Reads RUN/profile.jsonl and RUN/plans, writes only RUN/plans. Each plan is based on the active plan; every ask is
    answered, if need be with a plan that keeps the partition; no second plan is written while one has no result yet.
    Each decision is one line on stderr. After a restart it resumes from these two places.
    """
    from ..inputs.problem_from_options import parse_bytes
    from ..online.decision import WatchOptions
    from ..online.policies import PolicySettings
    from ..online.watch import Heartbeat
    from ..online.watch import watch as follow

    options = WatchOptions(
        balancer=balancer.value,
        policy=policy.value,
        granularity=None if granularity is None else granularity.value,
        objective=objective.value,
        settings=PolicySettings(min_gain=min_gain, margin=margin),
        window=window,
        min_records=min_records,
        every=every,
        horizon=horizon,
        min_layers=min_layers,
        memory_bytes=None if memory is None else parse_bytes(memory),
        lockstep=lockstep,
        pack_to=pack_to,
        min_throughput_fraction=min_throughput_fraction,
    )
    default_ms = 4.0 if lockstep else 50.0
    follow(
        run,
        options,
        once=once,
        poll_s=(poll_ms or default_ms) / 1000,
        parent_pid=parent_pid,
        heartbeat=None if heartbeat_s is None else Heartbeat(sys.stdout.fileno(), heartbeat_s),
    )
