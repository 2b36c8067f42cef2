"""A recipe as a trace: a profile whose steps an emulated run (``dynmo-train --emulate``) sleeps through.

The trace has some steps of the baseline, then the last steps of the technique's trajectory. So one run shows the
baseline, the technique under the initial partition, and the result of the planner.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..formats.profile import write_profile
from ..inputs.analytic_profile import build_lines
from ..inputs.scenarios import ScenarioStep
from .recipe import Recipe, dense_costs, steps_of


def trace_lines(recipe: Recipe, baseline_steps: int, technique_steps: int) -> Iterator[dict[str, Any]]:
    """The lines of the profile: the header, the baseline steps, and the last steps of the technique.

    Args:
        recipe: the technique and its assumptions.
        baseline_steps: number of steps at the dense costs, at the start of the trace; may be 0.
        technique_steps: number of steps from the end of the technique's trajectory.

    Raises:
        UsageError: the recipe has fewer steps than requested.
    """
    costs = dense_costs(recipe)
    document, header, dense = costs.document, costs.header, costs.dense
    # The trajectory is computed whole, because its costs depend on all steps before.
    last: deque[ScenarioStep] = deque(maxlen=technique_steps)
    event: Mapping[str, Any] | None = None
    for scenario_step in steps_of(recipe, costs):
        last.append(scenario_step)
        event = scenario_step.event or event
    if len(last) < technique_steps:
        raise UsageError(f"{recipe.name} has {len(last)} steps of its technique, not {technique_steps}; increase steps")
    before = [ScenarioStep(step=step, costs=dense) for step in range(1, baseline_steps + 1)]
    # The last event is moved to where the technique begins: the planner must void the costs of the baseline there. No
    # next event is announced, as none follows in the trace.
    after = [replace(one, step=step, event=None) for step, one in enumerate(last, start=baseline_steps + 1)]
    if event is not None:
        after[0] = replace(after[0], event={**event, "next_expected_step": None})
    yield from build_lines(document, header, iter([*before, *after]))


def write_trace(path: Path, recipe: Recipe, baseline_steps: int, technique_steps: int) -> None:
    """Write the trace.

    Args:
        path: profile to write.
        recipe: the technique and its assumptions.
        baseline_steps, technique_steps: as for ``trace_lines``.

    Raises:
        UsageError: the file exists, or the recipe has fewer steps than requested.
    """
    if path.exists():
        raise UsageError(f"{path} exists, and profiles are never overwritten; choose another name")
    lines = trace_lines(recipe, baseline_steps, technique_steps)
    write_profile(path, [json.dumps(line).encode() for line in lines])
