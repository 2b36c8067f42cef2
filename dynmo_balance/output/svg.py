"""The cells of a what-if grid as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .._common.errors import UsageError
from .._common.report.units import time_text
from ..analysis.what_if import Row

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
GRID_WIDTH, GRID_HEIGHT, GRID_LEFT, GRID_TOP = 760, 320, 80, 40
CHARACTER = 7.5
"""Width of a character of 12 px; the widest of common sans-serif fonts."""
MAX_SERIES = 40


def _label(row: Row, axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {getattr(row.cell, axis)}" for axis in axes) or "step"


def grid_chart(rows: Sequence[Row], axes: Sequence[str], answer: str) -> str:
    """The cells that have a partition; those on the Pareto front of throughput, workers and memory have a ring.

    Args:
        rows: the cells.
        axes: the axes that were varied; the first is the horizontal one.
        answer: a sentence for the title.

    Raises:
        UsageError: no cell has a partition, or there are too many lines.
    """
    usable = [row for row in rows if row.step_ns is not None]
    if not usable:
        raise UsageError("no cell of the grid has a feasible partition to draw; vary other values")
    series: dict[str, list[Row]] = {}
    for row in usable:
        series.setdefault(_label(row, axes[1:]), []).append(row)
    if len(series) > MAX_SERIES:
        raise UsageError(f"{len(series)} lines: a chart has at most {MAX_SERIES}; vary less")
    ticks = list(dict.fromkeys(getattr(row.cell, axes[0]) for row in usable))
    most = max(row.step_ns or 0 for row in usable)

    def spot(row: Row) -> tuple[float, float]:
        at = ticks.index(getattr(row.cell, axes[0])) / max(1, len(ticks) - 1)
        return GRID_LEFT + at * GRID_WIDTH, GRID_TOP + GRID_HEIGHT * (1 - (row.step_ns or 0) / most)

    legend = 30 + CHARACTER * max(map(len, series))
    width = round(max(GRID_LEFT + GRID_WIDTH + legend, CHARACTER * len(answer)))
    height = max(GRID_HEIGHT + GRID_TOP + 50, GRID_TOP + 18 * len(series) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(answer, quote=True)}" font-family="sans-serif" font-size="12">',
        f'<text x="0" y="16">{escape(answer)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = GRID_TOP + GRID_HEIGHT * (1 - share)
        parts.append(
            f'<line x1="{GRID_LEFT}" x2="{GRID_LEFT + GRID_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{GRID_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{time_text(share * most)}</text>')
    for at, tick in enumerate(ticks):
        x = GRID_LEFT + at / max(1, len(ticks) - 1) * GRID_WIDTH
        parts.append(
            f'<text x="{x:.1f}" y="{GRID_TOP + GRID_HEIGHT + 18}" text-anchor="middle">{escape(str(tick))}</text>'
        )
    parts.append(
        f'<text x="{GRID_LEFT}" y="{GRID_TOP + GRID_HEIGHT + 38}">{escape(axes[0])}; rings: Pareto front</text>'
    )
    for at, (name, members) in enumerate(series.items()):
        color = PALETTE[at % len(PALETTE)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(spot, members))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for row in members:
            x, y = spot(row)
            ring = ' stroke="#222222" stroke-width="2"' if row.pareto else ""
            tooltip = f"{_label(row, axes)}: {time_text(row.step_ns)}, {row.samples_per_s or 0:,.1f} samples/s"
            circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"{ring}>'
            parts.append(f"{circle}<title>{escape(tooltip)}</title></circle>")
        x = GRID_LEFT + GRID_WIDTH + 20
        parts.append(f'<text x="{x}" y="{GRID_TOP + 12 + 18 * at}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])
