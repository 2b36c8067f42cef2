"""What a plan is checked against: the profile's costs at the plan's step, and what the partition had to obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...costs.cost_window import ItemCosts
from ...costs.devices import Device
from ...formats.plan import RECORDS_KEY, SEGMENT_KEY, Constraints, Plan
from ...formats.profile import Header, Segment, read_profile
from ...inputs.profile_source import load, profile_path

USUAL_WINDOW = 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is checked against.

    Attributes:
        segments: of the profile, up to the one that the plan was made in, which is the last.
        costs: of the items at the step that the plan says, as measured.
        constraints: what the partition had to obey.
        granularity: where stages may begin.
        memory_given: whether the memory limits are the command's, so that they may be more than the profile's.
    """

    segments: Sequence[Segment]
    costs: ItemCosts
    constraints: Constraints
    granularity: str
    memory_given: bool = False

    @property
    def header(self) -> Header:
        """The header of the plan's segment."""
        return self.segments[-1].header


def default_constraints(plan: Plan, header: Header) -> Constraints:
    """What a plan that does not record its constraints had to obey: what the profile says."""
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
    """What the command names in place of what the plan and the profile say; None is "as they say"."""

    granularity: str | None = None
    microbatches: int | None = None
    min_layers: int | None = None
    memory_bytes: int | None = None
    window: int | None = None


def load_setting(
    plan: Plan,
    profile: Path,
    overrides: Overrides | None = None,
    *,
    device: Device | None = None,
    dtype: str = "float32",
) -> Setting:
    """The setting of a plan.

    Args:
        plan: the plan; its step, segment and number of records say which costs are meant.
        profile: ``profile.jsonl`` or the run directory.
        overrides: what is named in place of what the plan and the profile say.
        device, dtype: what to compute costs for where nothing was measured.

    Raises:
        DocumentError: the profile breaks a rule.
        UsageError: it holds no costs up to the plan's step.
    """
    named = overrides or Overrides()
    extra = plan.extra or {}
    records, number = extra.get(RECORDS_KEY), extra.get(SEGMENT_KEY)
    loaded = load(
        profile,
        window=named.window or (records if isinstance(records, int) and records > 0 else USUAL_WINDOW),
        at_step=plan.read_to_step or None,
        segment_number=number if isinstance(number, int) else None,
        device=device,
        dtype=dtype,
    )
    constraints = plan.constraints or default_constraints(plan, loaded.header)
    if named.memory_bytes is not None:
        constraints = replace(constraints, memory_bytes=(named.memory_bytes,) * len(plan.workers))
    segments = read_profile(profile_path(profile))
    last = next(at for at, segment in enumerate(segments) if segment.header == loaded.header)
    return Setting(
        segments=segments[: last + 1],
        costs=loaded.costs,
        constraints=replace(
            constraints,
            microbatches=named.microbatches or constraints.microbatches,
            min_layers=constraints.min_layers if named.min_layers is None else named.min_layers,
        ),
        granularity=named.granularity or plan.granularity or loaded.header.granularity,
        memory_given=named.memory_bytes is not None,
    )
