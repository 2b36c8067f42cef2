"""A what-if grid as a picture (SVG by hand): the step over the first axis, a line for each choice of the others."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ._common.errors import UsageError
from .charts import PALETTE
from .whatif import Row

WIDTH, HEIGHT, LEFT, TOP = 760, 320, 80, 40
LEGEND = 180
MAX_SERIES = 40


def _label(row: Row, axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {getattr(row.cell, axis)}" for axis in axes) or "step"


def picture(rows: Sequence[Row], axes: Sequence[str], answer: str) -> str:
    """The cells that have a partition; those on the front of throughput, workers and memory are ringed.

    Args:
        rows: the cells.
        axes: the axes that were varied; the first goes to the right.
        answer: a sentence for the heading.

    Raises:
        UsageError: no cell has a partition, or there are more lines than a picture can show.
    """
    usable = [row for row in rows if row.step_ns is not None]
    if not usable:
        raise UsageError("no cell of the grid has a feasible partition, so there is nothing to draw")
    series: dict[str, list[Row]] = {}
    for row in usable:
        series.setdefault(_label(row, axes[1:]), []).append(row)
    if len(series) > MAX_SERIES:
        raise UsageError(f"{len(series)} lines are more than a picture can show ({MAX_SERIES}); vary less")
    ticks = list(dict.fromkeys(getattr(row.cell, axes[0]) for row in usable))
    most = max(row.step_ns or 0 for row in usable)

    def spot(row: Row) -> tuple[float, float]:
        at = ticks.index(getattr(row.cell, axes[0])) / max(1, len(ticks) - 1)
        return LEFT + at * WIDTH, TOP + HEIGHT * (1 - (row.step_ns or 0) / most)

    height = max(HEIGHT + TOP + 50, TOP + 18 * len(series) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + LEGEND + 20} {height}" role="img"'
        f' aria-label="{escape(answer, quote=True)}" font-family="sans-serif" font-size="12">',
        f'<text x="0" y="16">{escape(answer)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most / 1e6:.3g} ms</text>')
    for at, tick in enumerate(ticks):
        x = LEFT + at / max(1, len(ticks) - 1) * WIDTH
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{escape(str(tick))}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 38}">{escape(axes[0])}; rings: no other cell beats it</text>')
    for at, (name, members) in enumerate(series.items()):
        colour = PALETTE[at % len(PALETTE)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(spot, members))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for row in members:
            x, y = spot(row)
            ring = ' stroke="#222222" stroke-width="2"' if row.pareto else ""
            words = f"{_label(row, axes)}: {(row.step_ns or 0) / 1e6:.2f} ms, {row.samples_per_s or 0:,.1f} samples/s"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"{ring}><title>{escape(words)}</title></circle>'
            )
        x = LEFT + WIDTH + 20
        parts.append(f'<text x="{x}" y="{TOP + 12 + 18 * at}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])
