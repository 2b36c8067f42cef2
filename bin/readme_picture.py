"""Draws the picture of the README from two real runs, light and dark, as SVG.

    bin/quickstart
    python bin/readme_picture.py runs/quickstart/static runs/quickstart/balanced bin/assets

Above: the cost of every part of every layer at every step of the balanced run, with the boundary between the stages
drawn over it. Below: the time of each step of both runs. ``bin/assets/picture.json`` holds the numbers, so that the
picture can be drawn again (``--redraw``) and a test can compare it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

WIDTH, LEFT, RIGHT, GRID_TOP, ROW, STEPS_TOP, STEPS_HEIGHT = 960, 100, 84, 84, 15, 400, 130
THEMES = {
    "light": {
        "ground": "#ffffff", "ink": "#1f2328", "faint": "#656d76", "line": "#d0d7de", "boundary": "#d1242f",
        "static": "#8c959f", "balanced": "#0969da", "low": (247, 251, 255), "high": (8, 81, 156), "more": "darker",
    },
    "dark": {
        "ground": "#0d1117", "ink": "#e6edf3", "faint": "#8d96a0", "line": "#30363d", "boundary": "#ff7b72",
        "static": "#8d96a0", "balanced": "#58a6ff", "low": (22, 27, 34), "high": (121, 192, 255), "more": "brighter",
    },
}  # fmt: skip


def records(path: Path) -> list[dict[str, Any]]:
    """All records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers_of(static: Path, balanced: Path) -> dict[str, Any]:
    """What the picture shows, from two run directories: costs in ms a microbatch, boundaries, step times in ms."""
    profile = records(balanced / "profile.jsonl")
    header = profile[0]
    steps = [record for record in profile if record["record"] == "step"]
    names = [item["name"] for item in header["items"]]
    plans = {}
    for path in sorted((balanced / "plans").glob("plan-*.json")):
        plan = json.loads(path.read_text(encoding="utf-8"))
        plans[plan["plan_id"]] = len(plan["stages"][0]["items"])
    costs = [[round((f + b) / 1e6, 2) for f, b in zip(r["forward_ns"], r["backward_ns"], strict=True)] for r in steps]
    events = records(balanced / "events.jsonl")
    times = {}
    for name, run in (("static", static), ("balanced", balanced)):
        rows = [row for row in records(run / "metrics.jsonl") if "step_ns" in row]
        times[name] = [[row["step"], round(row["step_ns"] / 1e6, 1)] for row in rows]
    return {
        "model": f"{header['model']['family'].upper()}, {header['model']['num_layers']} layers of width"
        f" {header['model']['hidden_size']}, two stages on two CPU processes",
        "items": names,
        "steps": [record["step"] for record in steps],
        "costs_ms": costs,
        "boundary": [plans[record["plan_id"]] for record in steps],
        "frozen": [[e["step"], len(e["frozen_items"])] for e in events if e["kind"] == "frozen"],
        "moved": [[e["step"], len(e["moves"]), e["bytes"]] for e in events if e["kind"] == "plan_applied"],
        "step_ms": times,
    }


def mixed(low: tuple[int, int, int], high: tuple[int, int, int], share: float) -> str:
    """A color between two: ``share`` 0 is ``low``, 1 is ``high``."""
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def svg(numbers: dict[str, Any], theme: dict[str, Any]) -> str:
    """The picture as an SVG document."""
    items, steps = numbers["items"], numbers["steps"]
    first, last = steps[0], steps[-1]
    span = WIDTH - LEFT - RIGHT
    cell = span / (last - first + 1)
    bottom = GRID_TOP + ROW * len(items)
    # The head is one product of the vocabulary's size: with it as the top of the scale, layers would be of one color.
    top_ms = max(cost for row in numbers["costs_ms"] for name, cost in zip(items, row, strict=True) if name != "head")

    def x(step: float) -> float:
        return LEFT + (step - first) * cell

    def text(at_x: float, at_y: float, words: str, *, size: int = 13, color: str = "ink", anchor: str = "start") -> str:
        place = f'x="{at_x:.1f}" y="{at_y:.1f}" font-size="{size}" text-anchor="{anchor}"'
        return f'<text {place} fill="{theme[color]}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {STEPS_TOP + STEPS_HEIGHT + 52}" role="img"'
        ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{title_of(numbers)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{theme["ground"]}"/>',
        text(LEFT, 28, title_of(numbers), size=17),
        text(LEFT, 50, f"{numbers['model']}; a real run, drawn by bin/readme_picture.py", color="faint"),
        text(
            LEFT,
            74,
            f"Cost of each part of a layer ({theme['more']}: more time) and boundary of the stages",
            color="faint",
        ),
    ]
    # The first step after a migration is not measured: the one after it stands for it.
    begins = [first, *(step + 1 for step in steps[:-1])]
    for begin, step, row in zip(begins, steps, numbers["costs_ms"], strict=True):
        for number, cost in enumerate(row):
            color = mixed(theme["low"], theme["high"], min(1.0, cost / top_ms) ** 0.8)
            parts.append(
                f'<rect x="{x(begin):.1f}" y="{GRID_TOP + number * ROW}" width="{(step + 1 - begin) * cell + 0.3:.1f}"'
                f' height="{ROW - 1}" fill="{color}"/>'
            )
    for number, name in enumerate(items):
        if name.endswith(".mlp"):
            continue
        label = name.replace("layers.", "layer ").replace(".attention", "")
        parts.append(text(LEFT - 10, GRID_TOP + number * ROW + ROW - 3, label, size=12, color="faint", anchor="end"))
    line = []
    for begin, step, boundary in zip(begins, steps, numbers["boundary"], strict=True):
        at = GRID_TOP + boundary * ROW - 0.5
        line += [f"{x(begin):.1f},{at}", f"{x(step + 1):.1f},{at}"]
    parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{theme["boundary"]}" stroke-width="3"/>')
    at_end = GRID_TOP + numbers["boundary"][-1] * ROW
    parts.append(text(WIDTH - RIGHT + 8, (GRID_TOP + at_end) / 2, "stage 0", color="boundary"))
    parts.append(text(WIDTH - RIGHT + 8, (at_end + bottom) / 2, "stage 1", color="boundary"))
    for step, count, num_bytes in numbers["moved"]:
        words = f"{count} parts move, {num_bytes / 1e6:.1f} MB"
        parts.append(text(x(step + 1) + 6, STEPS_TOP - 14, words, size=12, color="boundary"))
        parts.append(
            f'<line x1="{x(step + 1):.1f}" y1="{GRID_TOP}" x2="{x(step + 1):.1f}" y2="{STEPS_TOP + STEPS_HEIGHT}"'
            f' stroke="{theme["boundary"]}" stroke-dasharray="2 4"/>'
        )
    for step, _ in numbers["frozen"]:
        parts.append(
            f'<line x1="{x(step + 1):.1f}" y1="{GRID_TOP}" x2="{x(step + 1):.1f}" y2="{STEPS_TOP + STEPS_HEIGHT}"'
            f' stroke="{theme["faint"]}" stroke-dasharray="2 4"/>'
        )
    parts += step_times(numbers, theme, x, text, bottom)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def final_ratio(numbers: dict[str, Any]) -> float:
    """Median step time without balancing over that with it, from three steps after the last move on."""
    begin = max((step for step, *_ in numbers["moved"]), default=0) + 3
    medians = [median(ms for step, ms in numbers["step_ms"][name] if step > begin) for name in ("static", "balanced")]
    return medians[0] / medians[1]


def title_of(numbers: dict[str, Any]) -> str:
    """The headline, which has the ratio."""
    ratio = final_ratio(numbers)
    return f"Layers freeze and unbalance the pipeline; DynMo moves layers: {ratio:.2f} times as fast"


def step_times(numbers: dict[str, Any], theme: dict[str, Any], x: Any, text: Any, bottom: float) -> list[str]:
    """The lower panel: time of each step of both runs, with an axis and names at the lines."""
    steps = numbers["steps"]
    first, end = steps[0], steps[-1]
    inside = {name: [row for row in rows if first <= row[0] <= end] for name, rows in numbers["step_ms"].items()}
    high = max(ms for rows in inside.values() for _, ms in rows) * 1.05
    base = STEPS_TOP + STEPS_HEIGHT

    def y(ms: float) -> float:
        return base - ms / high * STEPS_HEIGHT

    parts = [text(LEFT, STEPS_TOP - 14, "Time of a step", color="faint")]
    unit = next(each for each in (50, 100, 200, 250, 500, 1000, 2000, 5000) if high / each <= 4)
    for ms in range(0, int(high) + 1, unit):
        ends = f'x1="{LEFT}" y1="{y(ms):.1f}" x2="{WIDTH - RIGHT}" y2="{y(ms):.1f}"'
        parts.append(f'<line {ends} stroke="{theme["line"]}"/>')
        parts.append(text(LEFT - 10, y(ms) + 4, f"{ms:,} ms", size=12, color="faint", anchor="end"))
    for name, rows in inside.items():
        points = " ".join(f"{x(step + 0.5):.1f},{y(ms):.1f}" for step, ms in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{theme[name]}" stroke-width="2.5"/>')
        last = median(ms for _, ms in rows[-5:])
        words = "best fixed partition" if name == "static" else "balanced by DynMo"
        at = y(last) - 10 if name == "static" else y(last) + 20
        parts.append(text(WIDTH - RIGHT - 4, at, words, color=name, anchor="end"))
    for step, count in numbers["frozen"]:
        parts.append(text(x(step + 1) + 5, base - 8, f"{(count - 1) // 2} layers frozen", size=12, color="faint"))
    tick = max(1, round((steps[-1] - steps[0]) / 10 / 5) * 5)
    parts += [
        text(x(step + 0.5), base + 20, str(step), size=12, color="faint", anchor="middle")
        for step in range(-(-steps[0] // tick) * tick, steps[-1] + 1, tick)
    ]
    parts.append(text(WIDTH - RIGHT, base + 40, "step", size=12, color="faint", anchor="end"))
    return parts


def draw(numbers: dict[str, Any], folder: Path) -> None:
    """Write ``balance-light.svg`` and ``balance-dark.svg`` into an existing folder."""
    for name, theme in THEMES.items():
        (folder / f"balance-{name}.svg").write_text(svg(numbers, theme), encoding="utf-8")


def main() -> int:
    """Read the runs, write the numbers and both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="static and balanced run directory")
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument("--redraw", action="store_true", help="draw the numbers of FOLDER/picture.json again")
    options = parser.parse_args()
    file = options.folder / "picture.json"
    if options.redraw:
        numbers = json.loads(file.read_text(encoding="utf-8"))
    elif len(options.runs) == 2:
        numbers = numbers_of(*options.runs)
        file.write_text(json.dumps(numbers, separators=(",", ":")) + "\n", encoding="utf-8")
    else:
        parser.error("give two run directories, or --redraw")
    draw(numbers, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
