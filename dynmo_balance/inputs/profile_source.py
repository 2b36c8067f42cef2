"""What the offline commands read: a profile or a run directory, and the records that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .._common.console import print_message
from .._common.errors import DynmoError, UsageError
from ..costs.analytic import costs_of_header
from ..costs.cost_window import CostWindow, ItemCosts, speeds_of_items
from ..costs.devices import Device
from ..formats.plan import Plan, header_problems, plan_numbers, plan_path, read_plan
from ..formats.profile import Event, Header, Segment, Step, read_profile
from ..formats.profile_records import COST_NEUTRAL_EVENTS, with_speeds
from ..partition.uniform import boundaries as even_split
from ..planning.plan_builder import problem_of_run
from .profile_summary import step_warnings


@dataclass(frozen=True, kw_only=True)
class ProfileSource:
    """The newest segment of a profile, its costs, and the active plan if the run's plans are available.

    Attributes:
        path: as given.
        header: of the segment, with the last measured speeds of the workers.
        costs: of the items.
        plan: the active plan; None if unknown.
        last_step: the last step that counts.
    """

    path: Path
    header: Header
    costs: ItemCosts
    plan: Plan | None
    last_step: int


def profile_path(path: Path) -> Path:
    """The profile of a run directory, or the file itself."""
    return path / "profile.jsonl" if path.is_dir() else path


def _active_plan(path: Path, header: Header, step: Step) -> Plan | None:
    return _readable_plan(path, header, step.plan_id)


def _readable_plan(path: Path, header: Header, plan_id: int) -> Plan | None:
    """A plan of a run directory; None if it cannot be read or does not fit the header."""
    folder = path / "plans"
    if not path.is_dir() or plan_id not in plan_numbers(folder):
        return None
    try:
        plan = read_plan(plan_path(folder, plan_id))
    except DynmoError:
        return None
    return None if header_problems(plan, header) else plan


def _plan_near(path: Path, header: Header, plan_id: int) -> Plan | None:
    """The plan of a step in the run directory of a profile that was given as a file."""
    return None if path.is_dir() else _readable_plan(path.parent, header, plan_id)


def costs_at_normal_speed(path: Path, window: CostWindow, header: Header, plan: Plan | None) -> ItemCosts | None:
    """The costs of a window, or None while an item has no sample.

    Args:
        path: of the profile, for the warning.
        window: the records.
        header: with the speeds of the workers.
        plan: the plan of the last record. If it is unknown and the speeds differ, the first plan of a run counts as
            the even split, with which a run starts by default.
    """
    if plan is not None:
        return window.costs(speeds_of_items(header, plan.owner))
    costs = window.costs()
    if costs is None or len({worker.relative_speed for worker in header.workers}) == 1:
        return costs
    at_plan = window.records[-1].plan_id
    if at_plan > 0:
        print_message(
            f"warning: {profile_path(path)}: workers have different speeds, and plan {at_plan}, under which the times"
            " were measured, is not next to the profile: all times count as those of a worker of normal speed"
        )
        return costs
    problem = problem_of_run(header, costs)
    spans = pairwise(even_split(problem))
    owner = {
        item.name: problem.slots[problem.positions[stage]].worker
        for stage, (begin, end) in enumerate(spans)
        for item in header.items[begin:end]
    }
    print_message(
        f"warning: {profile_path(path)}: workers have different speeds, and there is no plans/ next to the profile: the"
        " times count as measured under the even split of the layers"
    )
    return window.costs(speeds_of_items(header, owner))


def recorded_owners(path: Path, segment: Segment) -> dict[int, dict[str, int]]:
    """Plan id -> item -> worker, of the known plans under which the steps of a segment were measured."""
    plans = {number: _readable_plan(path, segment.header, number) for number in {s.plan_id for s in segment.steps}}
    return {number: plan.owner for number, plan in plans.items() if plan is not None}


def initial_plan(path: Path, header: Header) -> Plan | None:
    """The newest initial partition of a run directory that fits the header."""
    # The newest: each segment of a resumed run begins with an initial plan of its own.
    for number in reversed(plan_numbers(path / "plans") if path.is_dir() else []):
        try:
            plan = read_plan(plan_path(path / "plans", number))
        except DynmoError:
            continue
        if plan.balancer == "initial" and not header_problems(plan, header):
            return plan
    return None


def _records(segment: Segment, at_step: int | None, before_changes: bool) -> list[Step | Event]:
    """The steps and cost-changing events that count, up to ``at_step`` or before the first change."""
    chosen: list[Step | Event] = []
    for record in segment.records:
        if isinstance(record, Event) and record.kind not in COST_NEUTRAL_EVENTS:
            # A change right after the last step that counts would void all costs, with no step after it to give new
            # ones.
            steps = [r.step for r in chosen if isinstance(r, Step)]
            if steps and (before_changes or steps[-1] == at_step):
                break
            chosen.append(record)
        elif isinstance(record, Step):
            if at_step is not None and record.step > at_step:
                break
            chosen.append(record)
    return chosen


def _numbered(segments: Sequence[Segment], number: int, path: Path) -> Segment:
    """The segment with this number."""
    for segment in segments:
        if segment.header.segment == number:
            return segment
    last = segments[-1].header.segment
    raise UsageError(f"{profile_path(path)}: has no segment {number}; the last is {last}")


def load(
    path: Path,
    *,
    window: int = 20,
    at_step: int | None = None,
    segment_number: int | None = None,
    before_changes: bool = False,
    device: Device | None = None,
    dtype: str = "float32",
    recompute: str | None = None,
    fused_attention: bool | None = None,
) -> ProfileSource:
    """Read a profile or run directory.

    Args:
        path: ``profile.jsonl``, or a directory that contains it.
        window: maximum number of step records that costs are the median of.
        at_step: the last step that counts; default: the end of the profile.
        segment_number: the segment that counts; default: the newest with steps.
        before_changes: use the records before the first pruning or freezing of the segment.
        device: compute the costs for this device by ``costs.analytic``, even if some were measured.
        dtype, recompute, fused_attention: of computed costs; None is as in the header.

    Raises:
        DocumentError: the profile violates a rule.
        UsageError: it has no usable costs.
    """
    segments = read_profile(profile_path(path))
    # A run that was resumed a moment ago has a new header and no steps yet; the segment before still describes it.
    segment = next((s for s in reversed(segments) if s.steps), segments[-1])
    if segment_number is not None:
        segment = _numbered(segments, segment_number, path)
    header = segment.header
    costs_window = CostWindow(len(header.items), window)
    last: Step | None = None
    for record in _records(segment, at_step, before_changes):
        if isinstance(record, Event):
            header = with_speeds(header, record)
            costs_window.expire()
        else:
            costs_window.add(record)
            last = record
    if device is not None:
        if last is not None:
            print_message(
                f"costs: computed for {device.name}, dense | measured costs ignored: {len(segment.steps)} steps"
            )
        computed = costs_of_header(header, device, dtype, recompute, fused_attention=fused_attention)
        plan = initial_plan(path, header) if last is None else _active_plan(path, header, last)
        return ProfileSource(
            path=path, header=header, costs=computed, plan=plan, last_step=0 if last is None else last.step
        )
    if last is None:
        raise UsageError(
            f"{profile_path(path)}: has no step records to compute costs from; use --device to compute analytic costs"
        )
    warn_of_units(path, costs_window.records)
    plan = _active_plan(path, header, last)
    costs = costs_at_normal_speed(path, costs_window, header, plan or _plan_near(path, header, last.plan_id))
    if costs is None:
        raise UsageError(
            f"{profile_path(path)}: {costs_window.unsampled()} of {len(header.items)} items have no sample"
            " since the last cost change; choose an earlier --at-step"
        )
    return ProfileSource(path=path, header=header, costs=costs, plan=plan, last_step=last.step)


def warn_of_units(path: Path, records: Sequence[Step]) -> bool:
    """Warn on stderr if the times look like another unit than nanoseconds; returns whether they do.

    Only a warning: an item may take 50 ns, and ratios of times are right in any unit.
    """
    found = [problem for step in records for problem in step_warnings(step, f"step {step.step}")]
    if found:
        more = f" ({len(found) - 1:,} more: dynmo-plan profile check)" if len(found) > 1 else ""
        print_message(f"warning: {profile_path(path)}: {found[0].path}: {found[0].message}{more}")
    return bool(found)
