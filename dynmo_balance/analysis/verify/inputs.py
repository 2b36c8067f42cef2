"""What a plan is checked against: the profile's costs at the plan's step, and the constraints of the partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...costs.cost_window import ItemCosts
from ...costs.devices import Device
from ...formats.plan import RECORDS_KEY, SEGMENT_KEY, Constraints, Plan
from ...formats.profile import Header, Segment, read_profile
from ...inputs.profile_source import load, profile_path

DEFAULT_WINDOW = 20
"""Step records, for plans that do not state how many they used; the default of ``dynmo-plan partition``."""


@dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """What a plan is checked against.

    Attributes:
        segments: of the profile, up to and including the one that the plan was made in.
        header: of the last of them, with the speeds of the workers at the plan's step.
        costs: of the items at the plan's step, as measured.
        constraints: of the partition.
        granularity: where stages may begin.
        memory_given: whether the command gives the memory limits, which then may be above the profile's.
    """

    segments: Sequence[Segment]
    header: Header
    costs: ItemCosts
    constraints: Constraints
    granularity: str
    memory_given: bool = False


def default_constraints(plan: Plan, header: Header) -> Constraints:
    """The constraints of a plan that does not record them: those of the profile."""
    memory = {worker.worker: worker.memory_bytes for worker in header.workers}
    return Constraints(
        microbatches=header.microbatches,
        min_layers=1,
        memory_bytes=tuple(memory.get(worker, header.workers[0].memory_bytes) for worker in plan.workers),
        pins=(),
        tied_together=False,
    )


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Values of the command that replace those of the plan and the profile; None keeps them."""

    granularity: str | None = None
    microbatches: int | None = None
    min_layers: int | None = None
    memory_bytes: int | None = None
    window: int | None = None


def load_inputs(
    plan: Plan,
    profile: Path,
    overrides: Overrides | None = None,
    *,
    device: Device | None = None,
    dtype: str = "float32",
) -> VerifyInputs:
    """The setting of a plan.

    Args:
        plan: its step, segment and number of records select the costs.
        profile: ``profile.jsonl`` or the run directory.
        overrides: values that replace those of the plan and the profile.
        device, dtype: for computed costs, if nothing was measured.

    Raises:
        DocumentError: the profile violates a rule.
        UsageError: it has no costs up to the plan's step.
    """
    overrides = overrides or Overrides()
    extra = plan.extra or {}
    records, number = extra.get(RECORDS_KEY), extra.get(SEGMENT_KEY)
    loaded = load(
        profile,
        window=overrides.window or (records if isinstance(records, int) and records > 0 else DEFAULT_WINDOW),
        at_step=plan.read_to_step or None,
        segment_number=number if isinstance(number, int) else None,
        device=device,
        dtype=dtype,
    )
    constraints = plan.constraints or default_constraints(plan, loaded.header)
    if overrides.memory_bytes is not None:
        constraints = replace(constraints, memory_bytes=(overrides.memory_bytes,) * len(plan.workers))
    segments = read_profile(profile_path(profile))
    # Earlier segments count too: the pause that a planner had measured survives a resume.
    last = next(at for at, segment in enumerate(segments) if segment.header.segment == loaded.header.segment)
    return VerifyInputs(
        segments=segments[: last + 1],
        header=loaded.header,
        costs=loaded.costs,
        constraints=replace(
            constraints,
            microbatches=overrides.microbatches or constraints.microbatches,
            min_layers=constraints.min_layers if overrides.min_layers is None else overrides.min_layers,
        ),
        granularity=overrides.granularity or plan.granularity or loaded.header.granularity,
        memory_given=overrides.memory_bytes is not None,
    )
