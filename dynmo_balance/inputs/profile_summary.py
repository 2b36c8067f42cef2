"""Summaries of profiles: warnings for implausible numbers, and the heat map of items over time."""

from __future__ import annotations

from collections.abc import Sequence

from .._common.document import Problem
from .._common.errors import UsageError
from ..formats.profile import Segment, Step

MIN_PLAUSIBLE_NS, MAX_PLAUSIBLE_NS = 100, 100_000_000_000
"""An item's time outside these is probably in us, ms or s: a unit differs by a factor of at least 1000."""
SHADES = " .:-=+*#%@"


def _item_ns(step: Step, index: int) -> int:
    columns = (step.forward_ns, step.backward_ns, step.backward_input_ns, step.backward_weight_ns)
    return sum(column[index] or 0 for column in columns if column is not None)


def step_warnings(step: Step, where: str) -> list[Problem]:
    """Implausible numbers of a step record: times in another unit, a worker busier than the step is long."""
    found = []
    for name in ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns"):
        for index, value in enumerate(getattr(step, name) or ()):
            # Not sampled and did not run (a frozen item) are plausible.
            if value and not MIN_PLAUSIBLE_NS <= value <= MAX_PLAUSIBLE_NS:
                message = f"{value} ns is outside 100 ns to 100 s; is it another unit?"
                found.append(Problem(f"{where}.{name}[{index}]", "unit", message))
    busy = [value for value in step.busy_ns if value is not None]
    if busy and step.step_ns and max(busy) > step.step_ns:
        found.append(Problem(f"{where}.busy_ns", "value", f"{max(busy)} is more than the step's {step.step_ns}"))
    return found


def warnings_of(segments: Sequence[Segment]) -> list[Problem]:
    """Numbers that satisfy the format but are implausible, over all segments."""
    found = []
    for segment in segments:
        for step in segment.steps:
            found.extend(step_warnings(step, f"segment {segment.header.segment} step {step.step}"))
    return found


def heat_values(segment: Segment | None, width: int) -> tuple[list[str], list[list[int]]]:
    """The item names and, per item, the mean time in ns over at most ``width`` ranges of steps.

    Raises:
        UsageError: there is no segment with step records.
    """
    if segment is None:
        raise UsageError("the profile has no step records to show; record at least one step")
    steps = segment.steps
    columns = min(width, len(steps))
    stretches = [steps[c * len(steps) // columns : (c + 1) * len(steps) // columns] for c in range(columns)]
    names = [item.name for item in segment.header.items]
    values = [
        [sum(_item_ns(step, index) for step in stretch) // len(stretch) for stretch in stretches]
        for index in range(len(names))
    ]
    return names, values


def heat_map(names: Sequence[str], values: Sequence[Sequence[int]]) -> list[str]:
    """One line per item; the darkest shade is the most expensive item and range."""
    most = max((value for row in values for value in row), default=0) or 1
    wide = max(len(name) for name in names)
    lines = []
    for name, row in zip(names, values, strict=True):
        shades = "".join(SHADES[min(len(SHADES) - 1, value * len(SHADES) // (most + 1))] for value in row)
        lines.append(f"{name.ljust(wide)} |{shades}| {row[0] / 1e6:.3f} -> {row[-1] / 1e6:.3f} ms")
    return lines
