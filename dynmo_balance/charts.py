"""Line charts as SVG, written by hand: a few series over the steps of a run, with marks where something happened."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 240, 70, 30
MAX_POINTS = 600


def _thin(count: int) -> list[int]:
    if count <= MAX_POINTS:
        return list(range(count))
    return [at * (count - 1) // (MAX_POINTS - 1) for at in range(MAX_POINTS)]


def line_chart(
    title: str,
    xs: Sequence[int],
    series: Sequence[tuple[str, Sequence[float]]],
    unit: str,
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """The series over ``xs``; ``marks`` are vertical lines with a sentence each."""
    first, last = xs[0], max(xs[-1], xs[0] + 1)
    most = max((value for _, values in series for value in values), default=0.0) or 1.0

    def x_at(x: float) -> float:
        return LEFT + (x - first) * WIDTH / (last - first)

    def y_at(y: float) -> float:
        return 20 + HEIGHT * (1 - y / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {HEIGHT + 60}" role="img"'
        f' aria-label="{escape(title, quote=True)}" font-family="sans-serif" font-size="12">'
    ]
    for share in (0, 0.5, 1):
        y = y_at(share * most)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.3g} {unit}</text>')
    for x, words in marks:
        parts.append(
            f'<line class="mark" x1="{x_at(x):.1f}" x2="{x_at(x):.1f}" y1="20" y2="{20 + HEIGHT}" stroke="#888888"'
            f' stroke-dasharray="4 3"><title>{escape(words)}</title></line>'
        )
    for at, (name, values) in enumerate(series):
        colour = PALETTE[at % len(PALETTE)]
        points = " ".join(f"{x_at(xs[i]):.1f},{y_at(values[i]):.1f}" for i in _thin(len(xs)))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5">'
            f"<title>{escape(name)}</title></polyline>"
        )
        parts.append(f'<text x="{LEFT + 110 * at}" y="{HEIGHT + 54}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT + 36}">step {first}</text>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{HEIGHT + 36}" text-anchor="end">step {xs[-1]}</text>')
    return "\n".join([*parts, "</svg>"])
