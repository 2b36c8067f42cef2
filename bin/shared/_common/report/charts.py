"""The charts that a page has for any run: loss and step time, cost of layers, load, bubble, workers, memory.

Each function makes one block from one or two runs: a chart, or a sentence on what is missing and why. Values in charts
have four significant digits. Charts over steps have the group ``steps``: they zoom together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .page import Block, Chart, Note, Table, shortened
from .run_data import Mark, Partition, RunData, moved_items
from .series import Columns, Lines, Track, Values, joined, row_groups, significant
from .units import NONE, count_text, digits, plural, share_text, size_text, time_text

MAX_LINES = 6
"""Lines of a chart of stages or workers; more become the rows of a heat map."""
MAX_LOSSES = 8
"""Lines of a chart of losses: colors that differ for every reader."""
MAX_ROWS = 128
"""Rows of a heat map of stages or workers."""
MAX_LAYER_ROWS = 256
"""Rows of the heat map of layers; neighbors of a deeper model are merged."""
MAX_ITEM_ROWS = 96
"""Items, such as attention and MLP of a layer, have rows of their own up to this number; then layers have."""
MAX_SHOWN_MARKS = 120
"""Marks of a chart; the newest of a longer run."""
MAX_MARK_NAME = 40
"""Characters of the label of a mark."""
MAX_PARTITIONS = 400
"""Partitions that are drawn over a heat map; the newest of a longer run."""
MAX_CUTS = 512
"""Stage boundaries that are drawn in one partition."""
TABLE_ROWS = 12
QUANTUM = 9999
"""Costs of a heat map are written as shares of the highest, in steps of 1/9999."""
_FORMATS = {"ns": time_text, "bytes": size_text, "share": share_text, "count": count_text}


def text_of(value: float | None, unit: str) -> str:
    """A value with its unit, for tables."""
    if value is None:
        return NONE
    return _FORMATS[unit](value) if unit in _FORMATS else digits(value)


def step_range(runs: Sequence[RunData]) -> tuple[float, float]:
    """The steps of all runs, half a step wider at both ends."""
    ends = [
        step
        for run in runs
        for track in (run.step_ns, run.profiled_ns, *run.losses.values())
        for step in (track.steps[:1].tolist() + track.steps[-1:].tolist())
    ]
    return (min(ends) - 0.5, max(ends) + 0.5) if ends else (0.5, 1.5)


def marks_of(runs: Sequence[RunData], labels: Sequence[str]) -> list[list[Any]]:
    """Position, kind, label and sentence of the marks of all runs, in the order of steps."""
    marks: list[list[Any]] = []
    own = [{(mark.step, mark.kind, mark.name): mark for mark in run.marks[-MAX_SHOWN_MARKS:]} for run in runs]
    # What happened in both runs, such as a layer that froze, has one mark.
    common = set(own[0]).intersection(*own[1:]) if len(own) > 1 else set()
    common = {key for key in common if key[1] != "migration"}
    for run, label in zip(runs, labels, strict=True):
        previous = plan_before(run)
        for mark in run.marks[-MAX_SHOWN_MARKS:]:
            name = _name_of(run, mark, previous)
            is_common = (mark.step, mark.kind, mark.name) in common
            if is_common and run is not runs[0]:
                continue
            shown = name if is_common or not label else f"{shortened(label, 24)}: {name}"
            marks.append([mark.step + 0.5, mark.kind, shown, shortened(mark.text)])
    marks.sort(key=lambda mark: (mark[0], mark[2]))
    return marks


def plan_before(run: RunData) -> Mapping[int, Partition]:
    """For each plan that became active, the partition that was active before it."""
    plans = [number for _, number in run.active]
    return {after: run.partitions[before] for before, after in pairwise(plans) if before in run.partitions}


def _name_of(run: RunData, mark: Mark, previous: Mapping[int, Partition]) -> str:
    if mark.kind != "migration":
        return shortened(mark.name, MAX_MARK_NAME)
    number = int(mark.name.split()[1])
    moved = moved_items(previous.get(number), run.partitions.get(number))
    return shortened(f"{mark.name}: {run.count_text(moved)}" if moved else mark.name, MAX_MARK_NAME)


def sampled(lines: Lines, names: Sequence[str], units: Sequence[str], caption: str) -> Table:
    """A table of at most ``TABLE_ROWS`` of the points."""
    rows = []
    count = len(lines.steps)
    shown = sorted({round(at * (count - 1) / max(1, TABLE_ROWS - 1)) for at in range(TABLE_ROWS)}) if count else []
    for at in shown:
        values = [text_of(lines.means[name][at], unit) for name, unit in zip(names, units, strict=True)]
        rows.append([f"{lines.steps[at]:,.0f}", *values])
    reduced = f" Each row is the mean of {lines.width:,} steps." if lines.width > 1 else ""
    return Table(columns=["step", *names], rows=rows, caption=f"{caption}.{reduced}")


def lines_chart(
    name: str,
    title: str,
    text: str,
    series: Sequence[tuple[str, Track, str, Mapping[str, Any]]],
    runs: Sequence[RunData],
    marks: Sequence[Sequence[Any]],
    *,
    wide: bool = True,
    top: float | None = None,
) -> Chart:
    """A chart of lines over steps.

    Args:
        name: of the chart.
        title: of the chart.
        text: how to read it.
        series: name, values, unit (``ns``, ``bytes``, ``share``, ``count`` or ``value``) and options of each line.
        runs: for the range of steps.
        marks: vertical lines.
        wide: whether it needs the whole width.
        top: value that the first axis reaches at least, so that charts of several runs have one scale.
    """
    tracks = {label: track for label, track, _, _ in series}
    lines = joined(tracks)
    units = list(dict.fromkeys(unit for _, _, unit, _ in series))
    drawn = []
    for label, _, unit, options in series:
        one: dict[str, Any] = {"name": label, "axis": units.index(unit), "y": significant(lines.means[label])}
        if lines.width > 1 and options.get("band", True):
            one["low"] = significant(lines.least[label])
            one["high"] = significant(lines.most[label])
        drawn.append(one | {key: value for key, value in options.items() if key != "band"})
    width = f" Each point is the mean of {lines.width:,} steps." if lines.width > 1 else ""
    spec = {
        "kind": "lines",
        "group": "steps",
        "range": step_range(runs),
        "x": lines.steps,
        "axes": units,
        "top": top or 0,
        "series": drawn,
        "marks": list(marks),
    }
    table = sampled(lines, list(tracks), [unit for _, _, unit, _ in series], title)
    return Chart(name=name, title=title, text=text + width, spec=spec, table=table, wide=wide)


def heat_map(
    name: str,
    title: str,
    text: str,
    columns: Columns,
    rows: Sequence[str],
    unit: str,
    runs: Sequence[RunData],
    *,
    marks: Sequence[Sequence[Any]] = (),
    partitions: Sequence[Mapping[str, Any]] = (),
    table: Table | None = None,
    wide: bool = True,
    groups: Sequence[str] | None = None,
    limit: int = MAX_ROWS,
    top: float | None = None,
) -> Chart:
    """A chart of one color per row and range of steps; elements of a merged row are added.

    Args:
        name: of the chart.
        title: of the chart.
        text: how to read it.
        columns: vectors by step.
        rows: name of each element of a vector.
        unit: of the values.
        runs: for the range of steps.
        marks: vertical lines.
        partitions: ``from`` and ``to`` step, ``cuts`` and ``workers`` of each.
        table: instead of the mean of each row.
        wide: whether it needs the whole width.
        groups: group of each element of a vector, such as the layer of an item; rows of a group are merged first.
        limit: maximum number of rows.
        top: value of the strongest color; default: that of ``color_top``.
    """
    merged, vectors = _merged(columns, rows, groups or rows, limit)
    names = [shortened(name, 40) for name, _, _ in merged]
    values = [value for vector in vectors for value in vector if value is not None]
    highest = max(values, default=0.0) or 1.0
    numbers = [
        -1 if value is None else round(value / highest * QUANTUM)
        for at in range(len(names))
        for value in (vector[at] if at < len(vector) else None for vector in vectors)
    ]
    note = " Neighbors share a row." if len(merged) < len(set(groups or rows)) else ""
    width = f" Each column is the mean of {columns.width:,} steps." if columns.width > 1 else ""
    spec = {
        "kind": "heatmap",
        "group": "steps",
        "range": step_range(runs),
        "first": columns.first or 0,
        "width": columns.width,
        "columns": len(vectors),
        "rows": names,
        "unit": unit,
        "quantum": highest / QUANTUM,
        "top": top or color_top(values) or 1.0,
        "highest": highest,
        "values": numbers,
        "partitions": [
            {**each, "cuts": [_row_of(cut, merged) for cut in each["cuts"][:MAX_CUTS]]} for each in partitions
        ],
        "marks": list(marks),
    }
    return Chart(
        name=name,
        title=title,
        text=text + note + width,
        spec=spec,
        table=table or _row_means(vectors, names, unit, title),
        wide=wide,
    )


def color_top(values: Sequence[float]) -> float:
    """The value of the strongest color: the highest, unless it would leave the others without contrast.

    One very expensive row, such as the head, or one slow step is then shown in the color of all high values.
    """
    if not values:
        return 0.0
    usual = sorted(values)[int(len(values) * 0.95) - (len(values) == 1)]
    highest = max(values)
    return 1.5 * usual if highest > 2.5 * usual > 0 else highest


def _merged(
    columns: Columns, rows: Sequence[str], groups: Sequence[str], limit: int
) -> tuple[list[tuple[str, int, int]], list[Values]]:
    """At most ``limit`` rows, and the vectors with an element for each of them."""
    merged = row_groups(rows, groups, limit)
    return merged, [[_sum(vector[first:end]) for _, first, end in merged] for vector in columns.means()]


def _sum(values: Sequence[float | None]) -> float | None:
    return None if None in values or not values else sum(value for value in values if value is not None)


def _row_of(cut: int, rows: Sequence[tuple[str, int, int]]) -> float:
    """The position of a boundary before an element, in rows; within a merged row it is not whole."""
    for at, (_, first, end) in enumerate(rows):
        if cut < end:
            return round(at + (cut - first) / (end - first), 3)
    return len(rows)


def _row_means(vectors: Sequence[Values], names: Sequence[str], unit: str, caption: str) -> Table:
    rows = []
    for at, name in enumerate(names):
        values = [value for vector in vectors if at < len(vector) and (value := vector[at]) is not None]
        first, last = (values[0], values[-1]) if values else (None, None)
        rows.append([name, text_of(first, unit), text_of(last, unit), text_of(max(values, default=None), unit)])
    return Table(columns=["", "first", "last", "highest"], rows=rows, caption=caption)


def _no_step(run: RunData) -> str:
    return "the profile has no step yet" if run.header else "there is no profile, or it has no step yet"


def partition_spans(run: RunData) -> list[dict[str, Any]]:
    """The partitions that were active: first and last step, boundaries, and worker of each stage."""
    if not run.active or not run.profiled_ns.steps:
        return []
    ends = [step for step, _ in run.active[1:]] + [run.profiled_ns.steps[-1] + 1]
    spans: list[dict[str, Any]] = []
    for (step, number), end in zip(run.active, ends, strict=True):
        partition = run.partitions.get(number)
        if partition is not None:
            spans.append(
                {"from": step - 0.5, "to": end - 0.5, "cuts": partition.cuts, "workers": partition.workers[:MAX_CUTS]}
            )
    for before, after in pairwise(spans):
        before["to"] = after["from"]
    return spans[-MAX_PARTITIONS:]


def loss_and_step_time(run: RunData, marks: Sequence[Sequence[Any]]) -> Block:
    """Losses on the left axis, step time on the right one."""
    title = "Loss and step time"
    series: list[tuple[str, Track, str, Mapping[str, Any]]] = [
        (_loss_name(name), track, "value", _options(at, name))
        for at, (name, track) in enumerate(list(run.losses.items())[: MAX_LOSSES - 2])
        if len(track)
    ]
    if len(run.step_ns):
        series.append(("step time", run.step_ns, "ns", {"zero": True, "color": 1, "thin": True}))
    if not series:
        return Note(title=title, text="No step is recorded yet: the run has written neither a loss nor a step time.")
    text = "Loss on the left axis, step time on the right. A vertical line is a migration or a change of the model."
    if not run.losses:
        text = "There is no metrics.jsonl with losses: the chart has the step times of the profile."
    return lines_chart("loss", title, text, series, [run], marks)


def _options(at: int, name: str) -> dict[str, Any]:
    # Vermilion, the second color, is that of the step time.
    color = {"color": at if at == 0 else at + 1}
    return {"points": True, **color} if "validation" in name or "test" in name else color


def _loss_name(name: str) -> str:
    words = {"lm_loss": "training loss", "validation_loss": "validation loss", "test_loss": "test loss"}
    return words.get(name, shortened(name.replace("_", " "), 40))


def layer_costs(
    run: RunData, runs: Sequence[RunData], marks: Sequence[Sequence[Any]], *, name: str, title: str, top: float | None
) -> Block:
    """The heat map of costs, with the boundaries of stages over it; colors end at ``top`` ns, or at the maximum."""
    if not run.header or run.costs.first is None:
        return Note(title=title, text=f"No cost of a layer is recorded: {_no_step(run)}.")
    spans = partition_spans(run)
    text = (
        "Forward plus backward time of a microbatch. The lines are the stage boundaries: where one moves, layers move."
    )
    if not spans:
        text = "Forward plus backward time of a microbatch. Stage boundaries are unknown: there is no plan of the run."
    elif len(spans) == 1:
        text = "Forward plus backward time of a microbatch. The lines are the stage boundaries; no layer moved."
    items, layers, limit = _cost_rows(run)
    return heat_map(
        name,
        title,
        text,
        run.costs,
        items,
        "ns",
        runs,
        marks=marks,
        partitions=spans,
        table=partition_table(run),
        groups=layers,
        limit=limit,
        top=top,
    )


def _cost_rows(run: RunData) -> tuple[list[str], list[str], int]:
    """Name and layer of each item, and the maximum number of rows: that of layers where only they are placed."""
    items = [str(item["name"]) for item in run.header["items"]]
    layers = [str(item["layer"]) for item in run.header["items"]]
    is_by_layer = run.noun == "layer" or len(items) > MAX_ITEM_ROWS
    return items, layers, min(len(set(layers)), MAX_LAYER_ROWS) if is_by_layer else MAX_LAYER_ROWS


def partition_table(run: RunData) -> Table:
    """The layers of each stage, at first and now."""
    known = [run.partitions[number] for _, number in run.active if number in run.partitions]
    if not known:
        return Table(columns=["stage"], rows=[], caption="The stages are unknown")
    first, last = known[0], known[-1]
    rows = []
    for stage in range(min(max(len(first.items), len(last.items)), MAX_ROWS)):
        cells = [_span(each.items[stage], run) if stage < len(each.items) else NONE for each in (first, last)]
        worker = last.workers[stage] if stage < len(last.workers) else first.workers[stage]
        rows.append([str(stage), str(worker), *cells])
    caption = f"Layers of each stage under plan {first.plan_id} and plan {last.plan_id}"
    columns = ["stage", "worker", "first partition", "last partition"]
    return Table(columns=columns, rows=rows, text_columns=(2, 3), caption=caption)


def _span(names: Sequence[str], run: RunData) -> str:
    if not names:
        return "none"
    ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{ends} ({run.count_text(names)})"


def stage_loads(
    run: RunData, runs: Sequence[RunData], marks: Sequence[Sequence[Any]], *, name: str, title: str
) -> Block:
    """The time of each stage for a microbatch: as lines, or as a heat map where there are many stages.

    All runs have one scale.
    """
    if run.loads.first is None:
        reason = "there is no plan of the run" if run.header else _no_step(run)
        return Note(title=title, text=f"The load of stages is unknown: {reason}.")
    text = "Forward plus backward time of each stage for a microbatch. The slowest stage sets the pace."
    labels = [f"stage {at}" for at in range(run.loads.rows)]
    return _vectors(name, title, text, run.loads, labels, "ns", runs, marks, top=_highest(each.loads for each in runs))


def peak_memory(
    run: RunData, runs: Sequence[RunData], marks: Sequence[Sequence[Any]], *, name: str, title: str
) -> Block:
    """The peak memory of each worker."""
    if run.memory.first is None:
        return Note(title=title, text="No memory is recorded: the profile has no measured peak of any worker.")
    in_use = {worker["worker"] for worker in run.header["workers"]}
    stages = _stages_of_workers(run)
    labels = [f"worker {each}{stages.get(each, '') if each in in_use else ' (released)'}" for each in run.workers]
    sizes = [worker["memory_bytes"] for worker in run.header["workers"] if worker["memory_bytes"] is not None]
    limit = f" The smallest worker has {size_text(min(sizes))}." if sizes else ""
    top = _highest(each.memory for each in runs)
    text = f"Highest memory in use up to each step, of each worker and its stages.{limit}"
    if len(labels) > MAX_LINES:
        top = max(top, *sizes) if sizes else top  # colors are shares of the memory that a worker has
    return _vectors(name, title, text, run.memory, labels, "bytes", runs, marks, top=top)


def _highest(columns: Iterable[Columns]) -> float:
    return max(
        (value for each in columns for vector in each.means() for value in vector if value is not None), default=0
    )


def _stages_of_workers(run: RunData) -> dict[int, str]:
    known = [run.partitions[number] for _, number in run.active if number in run.partitions]
    stages: dict[int, list[int]] = {}
    for stage, worker in enumerate(known[-1].workers) if known else ():
        stages.setdefault(worker, []).append(stage)
    return {
        worker: f" (stage {numbers[0]})" if len(numbers) == 1 else f" (stages {', '.join(map(str, numbers[:4]))})"
        for worker, numbers in stages.items()
    }


def _vectors(
    name: str,
    title: str,
    text: str,
    columns: Columns,
    labels: Sequence[str],
    unit: str,
    runs: Sequence[RunData],
    marks: Sequence[Sequence[Any]],
    top: float | None = None,
) -> Chart:
    vectors = columns.means()
    if len(labels) > MAX_LINES:
        return heat_map(name, title, text, columns, labels, unit, runs, marks=marks, wide=False, top=top)
    tracks = [Track() for _ in labels]
    for at, vector in enumerate(vectors):
        for track, value in zip(tracks, vector, strict=False):
            if value is not None:
                track.add((columns.first or 0) + at * columns.width + (columns.width - 1) // 2, value)
    series = [(label, track, unit, {"zero": True}) for label, track in zip(labels, tracks, strict=True)]
    width = f" Each point is the mean of {columns.width:,} steps." if columns.width > 1 else ""
    return lines_chart(name, title, text + width, series, runs, marks, wide=False, top=top)


def bubble(runs: Sequence[RunData], labels: Sequence[str], marks: Sequence[Sequence[Any]], *, name: str) -> Block:
    """The share of the step in which workers wait."""
    title = "Bubble"
    measured = [(run, label) for run, label in zip(runs, labels, strict=True) if len(run.bubble)]
    if not measured:
        return Note(title=title, text="No bubble: one pipeline rank, or a profile without busy times of workers.")
    text = "Share of the workers' time without arithmetic: waiting, communication and the update of weights."
    series = [
        (label or "bubble", run.bubble, "share", {"zero": True, "color": at})
        for at, (run, label) in enumerate(measured)
    ]
    return lines_chart(name, title, text, series, list(runs), marks, wide=len(runs) > 1)


def workers_in_use(
    runs: Sequence[RunData], labels: Sequence[str], marks: Sequence[Sequence[Any]], *, name: str
) -> Block:
    """The number of workers with a stage, if it changed."""
    title = "Workers released"
    known = [(run, label) for run, label in zip(runs, labels, strict=True) if len(run.num_workers)]
    if not known:
        return Note(title=title, text="The number of workers in use is unknown: there is no plan of the run.")
    if all(min(run.num_workers.values) == max(run.num_workers.values) for run, _ in known):
        counts = [
            f"{label + ': ' if label else ''}{plural(int(run.num_workers.values[0]), 'worker')}" for run, label in known
        ]
        return Note(title=title, text=f"No worker was released. In use during the whole run: {'; '.join(counts)}.")
    series = [
        (label or "workers in use", run.num_workers, "count", {"zero": True, "steps": True, "color": at, "band": False})
        for at, (run, label) in enumerate(known)
    ]
    return lines_chart(
        name, title, "Workers with a stage. The others are released.", series, list(runs), marks, wide=False
    )


def compared_losses(runs: Sequence[RunData], labels: Sequence[str], marks: Sequence[Sequence[Any]]) -> Block:
    """The losses of two runs in one chart; the first is drawn wide, so that an equal second one lies within it."""
    series = [
        (f"{label}: {_loss_name(name)}", run.losses[name], "value", _line(at, name))
        for name in list(dict.fromkeys(name for run in runs for name in run.losses))[: MAX_LOSSES // len(runs)]
        for at, (run, label) in enumerate(zip(runs, labels, strict=True))
        if name in run.losses
    ]
    if not series:
        return Note(title="Loss", text="Neither run has recorded a loss.")
    text = "The first run is drawn wide: where the losses are equal, the second lies within it."
    return lines_chart("loss", "Loss", text, series, list(runs), marks)


def _line(at: int, name: str) -> dict[str, Any]:
    points = {"points": True} if "validation" in name or "test" in name else {}
    return {"color": at, "wide": at == 0, **points}


def compared_step_times(runs: Sequence[RunData], labels: Sequence[str], marks: Sequence[Sequence[Any]]) -> Block:
    """The step times of two runs in one chart."""
    series = [
        (label, run.step_ns, "ns", {"zero": True, "color": at})
        for at, (run, label) in enumerate(zip(runs, labels, strict=True))
        if len(run.step_ns)
    ]
    if not series:
        return Note(title="Step time", text="Neither run has recorded a step.")
    text = "Wall-clock time of each step. A vertical line is a migration or a change of the model."
    return lines_chart("step-time", "Step time", text, series, list(runs), marks)


def cost_top(runs: Iterable[RunData]) -> float | None:
    """The cost of the strongest color in the heat maps of several runs, which have the same colors."""
    values = [
        value
        for run in runs
        if run.header
        for vector in _merged(run.costs, *_cost_rows(run))[1]
        for value in vector
        if value is not None
    ]
    return color_top(values) or None
