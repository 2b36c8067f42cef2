"""A simulated step as text, as SVG, and as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import count
from typing import Any

from .._common.report.units import time_text
from ..schedules.registry import Kind
from ..simulation.simulator import Timeline

LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "b",
    Kind.BACKWARD_WEIGHT: "w",
    Kind.SHARD_FORWARD: "S",
    Kind.SHARD_WEIGHT: "T",
}


def as_text(timeline: Timeline, width: int = 100) -> list[str]:
    """One string per worker: F forward, B full backward, b input gradient, w weight gradient, a dot is idle.

    S and T are the passes of a sharded output layer: its part of the loss, and its weight gradient.

    Each of the ``width`` characters shows what takes most of its slice of the step.
    """
    whole = max(1, timeline.step_ns)
    lines = []
    for row in timeline.spans:
        shares: list[dict[str, int]] = [{} for _ in range(width)]
        for span in row:
            first = span.start_ns * width // whole
            last = min(width - 1, max(first, -(-span.end_ns * width // whole) - 1))
            for slot in range(first, last + 1):
                begin, end = slot * whole // width, (slot + 1) * whole // width
                inside = min(end, span.end_ns) - max(begin, span.start_ns)
                letter = LETTERS[span.kind]
                shares[slot][letter] = shares[slot].get(letter, 0) + max(0, inside)
        lines.append("".join(_letter(share, whole // width) for share in shares))
    return lines


def _letter(share: dict[str, int], slice_ns: int) -> str:
    busy = sum(share.values())
    if not share or 2 * busy < slice_ns:
        return "."
    return max(share, key=lambda letter: share[letter])


COLORS = {
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#d55e00",
    Kind.BACKWARD_INPUT: "#d55e00",
    Kind.BACKWARD_WEIGHT: "#00805f",
    Kind.SHARD_FORWARD: "#cc79a7",
    Kind.SHARD_WEIGHT: "#8a5a00",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
    Kind.SHARD_FORWARD: "output shards",
    Kind.SHARD_WEIGHT: "weight gradient of output shards",
}
ROW, LEFT, TOP, RIGHT = 26, 90, 30, 40
CHARACTER = 7.5
"""Width of a character of 12 px; the widest of common sans-serif fonts."""
TICKS = 8


def tick_times(end_ns: int, most: int = TICKS) -> list[int]:
    """At most ``most`` round times from 0 to the end of a step, ``end_ns``, in ns."""
    steps = (factor * 10**power for power in count() for factor in (1, 2, 5))
    step = next(step for step in steps if end_ns <= step * most)
    return list(range(0, end_ns + 1, step))


def as_svg(timeline: Timeline, workers: Sequence[int], title: str, width: int = 1000) -> str:
    """One row per worker, one box per operation with its microbatch and a tooltip, and a time axis.

    Args:
        timeline: the simulated step.
        workers: id of each row's worker.
        title: text above the picture.
        width: width of the step in SVG user units (pixels at 100 %).
    """
    whole = max(1, timeline.step_ns)
    height = TOP + ROW * len(timeline.spans) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + RIGHT} {height}" role="img"'
        f' aria-label="{escape(title, quote=True)}" font-family="sans-serif" font-size="12">',
        f'<text x="0" y="16">{escape(title)}: {timeline.step_ns / 1e6:.2f} ms,'
        f" bubble {timeline.bubble_fraction:.1%}</text>",
    ]
    for row, spans in enumerate(timeline.spans):
        y = TOP + ROW * row
        parts.append(f'<text x="0" y="{y + 15}">worker {workers[row]}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW - 6}" fill="#eeeeee"/>')
        for span in spans:
            x = LEFT + span.start_ns * width / whole
            wide = max(0.3, (span.end_ns - span.start_ns) * width / whole)
            shade = 1.0 if span.microbatch % 2 == 0 else 0.75
            label = (
                f"stage {span.stage} {NAMES[span.kind]} of microbatch {span.microbatch}:"
                f" {time_text(span.start_ns)} to {time_text(span.end_ns)}"
            )
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW - 6}" fill="{COLORS[span.kind]}"'
                f' fill-opacity="{shade}"><title>{escape(label)}</title></rect>'
            )
            number = str(span.microbatch)
            if wide > CHARACTER * len(number) + 2:
                parts.append(
                    f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="#ffffff"'
                    f' pointer-events="none">{number}</text>'
                )
    y = TOP + ROW * len(timeline.spans)
    for tick in tick_times(whole):
        x = LEFT + tick * width / whole
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y}" stroke="#cccccc" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 12}" text-anchor="middle">{time_text(tick)}</text>')
    kinds = {span.kind for spans in timeline.spans for span in spans if span.end_ns > span.start_ns}
    for at, kind in enumerate(kind for kind in COLORS if kind in kinds):
        parts.append(f'<rect x="{LEFT + 140 * at}" y="{y + 24}" width="10" height="10" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{LEFT + 140 * at + 14}" y="{y + 34}">{NAMES[kind]}</text>')
    return "\n".join([*parts, "</svg>"])


def as_trace(timeline: Timeline, workers: Sequence[int]) -> dict[str, Any]:
    """Complete events of the Trace Event Format; times in us."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": worker, "args": {"name": f"worker {worker}"}}
        for worker in workers
    ]
    for worker, spans in zip(workers, timeline.spans, strict=True):
        events.extend(
            {
                "name": f"{NAMES[span.kind]} {span.microbatch}",
                "cat": NAMES[span.kind],
                "ph": "X",
                "pid": 0,
                "tid": worker,
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
            for span in spans
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
