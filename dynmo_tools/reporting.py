"""What a person reads of a finished step."""

from __future__ import annotations

from collections.abc import Mapping

from ._common.console import human_bytes
from .jobs import Summary


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))


def describe(summary: Summary) -> str:
    """One line: documents and bytes in, kept, dropped and rejected by reason, seconds and MB/s."""
    tally = summary.tally
    parts = [f"{tally.documents_in:,} documents in ({human_bytes(tally.bytes_in)})", f"{tally.documents_kept:,} kept"]
    if tally.changed:
        parts.append(f"{tally.changed:,} changed")
    if tally.dropped:
        parts.append(f"{sum(tally.dropped.values()):,} dropped ({_reasons(tally.dropped)})")
    if tally.rejected:
        parts.append(f"{tally.num_rejected:,} rejected ({_reasons(tally.rejected)})")
    if tally.blank_lines:
        parts.append(f"{tally.blank_lines:,} blank lines")
    parts += [f"{name.replace('_', ' ')} {_value(value)}" for name, value in summary.facts.items()]
    rate = human_bytes(tally.bytes_in / summary.seconds) if summary.seconds else "0 B"
    done = "done before" if summary.reused else f"{summary.seconds:.1f} s, {rate}/s"
    return f"{summary.step}: {'; '.join(parts)}; {done}"


def _value(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {element}" for key, element in value.items())
    return str(value)
