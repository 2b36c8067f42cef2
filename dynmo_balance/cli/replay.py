"""``dynmo-plan replay``: policies compared with the offline optimum."""

from __future__ import annotations

from typing import Annotated

import typer

from .._common.console import Format, emit_json, emit_table
from .._common.document import MAX_STEPS
from .options import FormatOption, Policy, SourceArgument


def replay(
    source: SourceArgument,
    policy: Annotated[list[Policy] | None, typer.Option(help="Policy to replay, repeatable. Default: all.")] = None,
    pause_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds per migration, in addition to its transfer time.")
    ] = 300.0,
    every: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps between decisions.")] = 10,
    window: Annotated[
        int, typer.Option(min=2, max=MAX_STEPS, help="Number of step records; costs are their median.")
    ] = 20,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Replay a recorded profile under each policy and compare with the offline optimum.

    The newest segment with steps is replayed on a virtual clock, starting from the static uniform partition.
    """
    from .._common.errors import UsageError
    from ..analysis.replay import RecordedRun, offline_optimum, run_policy
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path, recorded_owners, warn_of_units
    from ..online.decision import WatchOptions

    segment = next((s for s in reversed(read_profile(profile_path(source))) if s.steps), None)
    if segment is None:
        raise UsageError(f"{source}: has no step records to replay; record at least one step")
    warn_of_units(source, segment.steps)
    recorded = RecordedRun(segment, round(pause_ms * 1e6), recorded_owners(source, segment))
    best = offline_optimum(recorded)
    # The bottleneck, which is proven, for all: replayed steps follow a closed form of it, not the simulator.
    outcomes = [
        run_policy(recorded, WatchOptions(policy=chosen.value, every=every, window=window, objective="bottleneck"))
        for chosen in policy or list(Policy)
    ]
    if output_format is Format.JSON:
        emit_json(
            [
                {
                    "policy": outcome.policy,
                    "total_ns": outcome.total_ns,
                    "ratio": outcome.total_ns / best.total_ns,
                    "pauses_ns": outcome.pauses_ns,
                    "moves": outcome.moves,
                }
                for outcome in (*outcomes, best)
            ]
        )
        return
    emit_table(
        f"{len(recorded.works)} steps, pause {pause_ms:g} ms plus transfer",
        ["policy", "time s", "time / offline", "moves", "in pauses"],
        [
            [
                outcome.policy,
                f"{outcome.total_ns / 1e9:.2f}",
                f"{outcome.total_ns / best.total_ns:.4f}",
                str(outcome.moves),
                "-" if outcome.pauses_ns is None else f"{outcome.pauses_ns / outcome.total_ns:.2%}",
            ]
            for outcome in (*outcomes, best)
        ],
    )
