"""What ``dynmo-train doctor`` reports: one finding per component, with the cost of a missing one and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# "error": required and missing; training does not run. "missing": optional. "warning": present, but limits a run.
Status = Literal["ok", "missing", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One component of the environment.

    Attributes:
        group: section of the report.
        name: component.
        status: whether it is usable.
        found: version, size or value.
        cost: what does not work or is slower; empty if ``status`` is ``ok``.
        remedy: how to change that; empty if ``status`` is ``ok``.
    """

    group: str
    name: str
    status: Status
    found: str
    cost: str = ""
    remedy: str = ""

    def document(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self)


def ok(group: str, name: str, found: str) -> Finding:
    """A component that is usable."""
    return Finding(group=group, name=name, status="ok", found=found)


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether everything that training requires is there."""
    return all(finding.status != "error" for finding in findings)


def report_lines(findings: Sequence[Finding]) -> list[str]:
    """The report as text: components by group, with cost and remedy below each that is not ok."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    for group in dict.fromkeys(finding.group for finding in findings):
        lines += ["", group] if lines else [group]
        for finding in findings:
            if finding.group != group:
                continue
            lines.append(f"  {finding.status:<7}  {finding.name:<{width}}  {finding.found}".rstrip())
            indent = " " * (width + 13)
            if finding.cost:
                lines.append(f"{indent}cost: {finding.cost}")
            if finding.remedy:
                lines.append(f"{indent}fix: {finding.remedy}")
    counts = {status: sum(each.status == status for each in findings) for status in ("error", "warning", "missing")}
    totals = " | ".join(f"{name}: {count}" for name, count in counts.items())
    lines += ["", f"{'usable' if is_usable(findings) else 'not usable'} | {totals}"]
    return lines
