"""The live view of a run as lines of text, for a terminal of any size.

The view is a list of sections by priority. ``allocate`` gives each the rows that it needs at least, as far as the
terminal has them, and divides the rest. From 100 columns on, sections stand in two columns. Nothing here reads a file
or a terminal, so that tests compare whole views.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from ..._common.console import human_bytes
from .run_records import resample
from .run_status import RunStatus, WorkerStatus, as_text

TWO_COLUMNS = 100
# Without a step for this time, and for this number of steps, the view reports it.
IDLE_S = 60.0
IDLE_STEPS = 10
MAX_CHART_ROWS = 6
MIN_BAR = 12
# ``layers.0 .. layers.5`` is shown as ``layers.0-5``.
_LAYER_RANGE = re.compile(r"layers\.(\d+) \.\. layers\.(?=\d+(?:,|$))")
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_GAP = 2


@dataclass(frozen=True)
class _Section:
    """Lines under a title.

    Attributes:
        title: text of the first line.
        rows: minimum, preferred and maximum number of rows, with the title.
        lines: makes the lines from the width and the number of rows without the title.
    """

    title: str
    rows: tuple[int, int, int]
    lines: Callable[[int, int], list[Text]]


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """A sparkline of block characters, scaled from the lowest to the highest value."""
    return chart(values, len(values), 1, ascii_only=ascii_only)[0] if values else ""


def chart(values: Sequence[float], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """A curve of block characters, scaled from the lowest to the highest value.

    Args:
        values: values in order; more than ``width`` are averaged.
        width: number of columns.
        height: number of lines.
        ascii_only: whether the terminal has no block characters.

    Returns:
        ``height`` lines, top first.
    """
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    points = resample(values, width)
    low, high = (min(points), max(points)) if points else (0.0, 0.0)
    # The number of levels of a line is that of the blocks; the lowest value is the lowest block, not an empty column.
    scale = (len(blocks) * height - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((value - low) * scale) for value in points]
    lines = []
    for row in reversed(range(height)):
        above = [min(len(blocks), level - row * len(blocks)) for level in levels]
        lines.append("".join(blocks[level - 1] if level > 0 else " " for level in above))
    return lines


def bar(fraction: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of ``width`` characters, filled to ``fraction``."""
    filled = round(min(1.0, max(0.0, fraction)) * width)
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


def duration(seconds: float) -> str:
    """A time in its two largest units: ``2 h 05 min``.

    Args:
        seconds: the time in seconds.
    """
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"


def number(value: float | None, form: str, unit: str = "") -> str:
    """A value with its unit; ``-`` for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


def state(status: RunStatus) -> str:
    """What the run does, in a word or two."""
    if status.is_done:
        return "done"
    if status.exit_code is not None:
        return f"stopped (exit code {status.exit_code})"
    if status.has_processes is False:
        return "stopped (no process of it is left)"
    if status.step == 0:
        return "starting"
    limit = max(IDLE_S, IDLE_STEPS * (status.step_ms or 0.0) / 1e3)
    if status.idle_s is not None and status.idle_s > limit:
        return f"no step for {duration(status.idle_s)}"
    return "running"


def time_left(status: RunStatus) -> str:
    """The time of the remaining steps, after a comma; empty unless the run is running."""
    if status.time_left_s is None or state(status) != "running":
        return ""
    return f", {duration(status.time_left_s)} left"


def rate_parts(status: RunStatus) -> list[str]:
    """Throughput, step time, bubble of several pipeline ranks, and MFU where it is known."""
    parts = [
        number(status.tokens_per_s, ",.0f", " tokens/s"),
        number(status.step_ms, ",.1f", " ms/step"),
    ]
    if len(status.workers) != 1:
        parts.append(f"bubble {number(status.bubble, '.1%')}")
    return parts if status.mfu is None else [*parts, f"MFU {status.mfu:.1%}"]


def loss_parts(status: RunStatus) -> list[str]:
    """Losses, learning rate and skipped steps."""
    return [
        f"loss {number(status.loss, '.4f')}",
        f"validation {number(status.validation_loss, '.4f')}",
        f"learning rate {number(status.learning_rate, '.3E')}",
        f"skipped {'at least ' if status.skipped_is_minimum else ''}{status.skipped:,}",
    ]


def worker_parts(status: RunStatus) -> list[str]:
    """Active, joined, released, slow and requested workers; empty without any of them."""
    count = len(status.workers)
    parts = [f"{count} worker{'' if count == 1 else 's'} active"] if count else []
    if status.joined:
        parts.append(f"joined: {as_text(status.joined)}")
    if status.released:
        parts.append(f"released: {as_text(status.released)}")
    slow = [f"{each.worker} ({each.relative_speed:.2f})" for each in status.workers if each.relative_speed != 1.0]
    if slow:
        parts.append(f"slow: {', '.join(slow)}")
    if status.requested_workers is not None:
        parts.append(f"requested: {status.requested_workers} workers")
    return parts


def migration_line(status: RunStatus) -> str | None:
    """The next migration, or the next step at which one is possible; None without online balancing."""
    plan = status.next_migration
    if plan is None:
        if status.next_boundary is None:
            return None
        return f"next migration: none planned; possible after step {status.next_boundary:,}"
    moves = f"{plan.moves} item{'' if plan.moves == 1 else 's'} ({human_bytes(plan.bytes)})"
    gain = f", predicted gain {plan.gain_fraction:.1%}" if plan.gain_fraction is not None else ""
    released = f", releases {as_text(plan.released)}" if plan.released else ""
    return f"next migration: plan {plan.plan_id} after step {plan.step:,}, moves {moves}{gain}{released}"


def event_line(status: RunStatus) -> str | None:
    """The next announced change of costs."""
    if status.next_event is None:
        return None
    kind, step = status.next_event
    return f"next event: {kind} at step {step:,}"


def incident_line(status: RunStatus) -> str | None:
    """Number of incidents, what they cost, and the last one; None without any."""
    if not status.num_incidents:
        return None
    count, steps = status.num_incidents, status.steps_lost
    lost = f"{steps:,} step{'s'[: steps != 1]} and {duration(status.seconds_lost)} lost"
    last = status.incidents[-1]
    place = f" at step {last['step']:,}" if isinstance(last.get("step"), int) else ""
    return f"{count:,} incident{'s'[: count != 1]}, {lost}; last{place}: {last['message']}"


def wrap_parts(parts: Sequence[str], width: int) -> list[str]:
    """Parts joined by bars, in lines of at most ``width`` characters where a part fits."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return lines


def allocate(rows: int, needs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Rows of each section, by priority.

    Args:
        rows: number of rows in all.
        needs: minimum, preferred and maximum number of rows of each section, the most important first.

    Returns:
        For each section at least its minimum, or 0 where the rows do not suffice.
    """
    given = []
    for minimum, _, _ in needs:
        given.append(minimum if minimum <= rows else 0)
        rows -= given[-1]
    for at, (_, preferred, _) in enumerate(needs):
        more = min(rows, max(0, preferred - given[at])) if given[at] else 0
        given[at] += more
        rows -= more
    # One row each in turn, so that a tall chart leaves rows to the sections below.
    while growing := [at for at, (_, _, maximum) in enumerate(needs) if 0 < given[at] < maximum][:rows]:
        for at in growing:
            given[at] += 1
        rows -= len(growing)
    return given


class LiveView:
    """Draws a status.

    Args:
        status: the status of the run.
        ascii_only: whether the terminal has no block characters.
    """

    def __init__(self, status: RunStatus, *, ascii_only: bool = False) -> None:
        self.status, self._ascii = status, ascii_only

    def lines(self, width: int, height: int) -> list[Text]:
        """The view as lines.

        Args:
            width: maximum number of characters of a line.
            height: maximum number of lines.
        """
        lines = self._head(width)
        left, right, below = self._sections()
        rest = height - len(lines)
        if width >= TWO_COLUMNS:
            column = (width - _GAP) // 2
            # At least a third is for plans and events, as far as they need it.
            top = min(rest - min(_max_rows(below), max(3, rest // 3)), max(_max_rows(left), _max_rows(right)))
            left_lines, right_lines = self._stack(left, column, top), self._stack(right, width - _GAP - column, top)
            lines += _side_by_side(left_lines, right_lines, column)
            lines += self._stack(below, width, height - len(lines))
        else:
            lines += self._stack([*left, *right, *below], width, rest)
        return [fit(line, width, ascii_only=self._ascii) for line in lines[:height]]

    def render(self, width: int, height: int) -> Text:
        """The lines as one text.

        Args:
            width: maximum number of characters of a line.
            height: maximum number of lines.
        """
        return Text("\n").join(self.lines(width, height))

    def _head(self, width: int) -> list[Text]:
        status = self.status
        of = f" of {status.train_iters:,}" if status.train_iters is not None else ""
        facts = f"step {status.step:,}{of} | {state(status)}"
        name = f"{status.run} | {status.model}" if status.model else status.run
        room = width - len(facts) - 3
        if room < len(name):
            name = status.run if len(status.run) <= room else f"...{status.run[-(room - 3) :]}" if room > 6 else ""
        head = Text(f"{name} | " if name else "", style="bold")
        head.append(facts, style="bold green" if state(status) in ("running", "done") else "bold yellow")
        if status.train_iters is None:
            return [head]
        fraction = status.step / max(1, status.train_iters)
        left = time_left(status)
        text = f" {fraction:.1%}{left}"
        return [head, Text(bar(fraction, max(1, width - len(text)), ascii_only=self._ascii), style="cyan").append(text)]

    def _sections(self) -> tuple[list[_Section], list[_Section], list[_Section]]:
        """Sections of the left column, of the right one and of those below both; in one column in this order."""
        status = self.status
        loads = max(1, len(status.workers)) + len(worker_parts(status)[1:])
        plans = len(self._plan_lines())
        events = len(status.events) + bool(status.invalid_lines) + bool(status.num_incidents)
        return (
            [
                _Section("Loss", (3, 4, 3 + MAX_CHART_ROWS), self._loss),
                _Section("Throughput", (2, 2, 4), self._throughput),
            ],
            [_Section("Stages: worker, load, peak memory, layers", (2, 2 + min(4, loads), 2 + loads), self._stages)],
            [
                _Section("Plans", (2, min(3, 1 + plans), 1 + plans), self._plans),
                _Section("Events", (2, 2, 1 + max(1, events)), self._events),
            ],
        )

    def _stack(self, sections: Sequence[_Section], width: int, rows: int) -> list[Text]:
        lines: list[Text] = []
        given = allocate(rows, [each.rows for each in sections])
        rule = "-" if self._ascii else "─"
        for section, count in zip(sections, given, strict=True):
            if count:
                lines.append(Text(f"{rule * 2} {section.title} ".ljust(width, rule), style="dim"))
                lines += section.lines(width, count - 1)[: count - 1]
        return lines

    def _loss(self, width: int, rows: int) -> list[Text]:
        facts = [Text(line) for line in wrap_parts(loss_parts(self.status), width)]
        # A chart of one line at least; in a narrow terminal the last figures give way.
        facts = facts[: max(1, rows - 1)]
        curve = self.status.loss_curve
        height = min(MAX_CHART_ROWS, rows - len(facts))
        if not curve or height < 1:
            return facts
        low, high = min(curve), max(curve)
        labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"][-height:] if height > 1 else [""]
        margin = max(map(len, labels))
        lines = chart(curve, width - margin - (1 if margin else 0), height, ascii_only=self._ascii)
        drawn = [
            Text(f"{label:>{margin}} " if margin else "").append(line, style="green")
            for label, line in zip(labels, lines, strict=True)
        ]
        return [*facts, *drawn]

    def _throughput(self, width: int, rows: int) -> list[Text]:
        facts = [Text(line) for line in wrap_parts(rate_parts(self.status), width)][:rows]
        curve = self.status.tokens_per_s_curve
        if curve and len(facts) < rows:
            facts.append(Text(chart(curve, width, 1, ascii_only=self._ascii)[0], style="blue"))
        return facts

    def _stages(self, width: int, rows: int) -> list[Text]:
        status = self.status
        facts = [Text(line) for line in wrap_parts(worker_parts(status), width)]
        if not status.workers:
            return facts or [Text("not measured yet")]
        room = rows - len(facts)
        if room < 1:
            return self._load_summary(status.workers)
        if len(status.workers) <= room:
            return [*facts, *self._bars(status.workers, width)]
        # The last row stands for the workers that have none.
        shown, others = status.workers[: room - 1], status.workers[room - 1 :]
        return [*facts, *self._bars(shown, width), *self._load_summary(others)]

    @staticmethod
    def _load_summary(workers: Sequence[WorkerStatus]) -> list[Text]:
        loads = [each.load for each in workers if each.load is not None]
        found = f"load {min(loads):.1%} to {max(loads):.1%}" if loads else "not measured yet"
        return [Text(f"{len(workers)} workers: {found}")]

    def _bars(self, workers: Sequence[WorkerStatus], width: int) -> list[Text]:
        names = [str(each.worker) for each in workers]
        memory = [_memory(each) for each in workers]
        layers = [_LAYER_RANGE.sub(r"layers.\1-", each.layers) for each in workers]
        name_width, memory_width = max(map(len, names)), max(map(len, memory))
        layers_width = min(max(map(len, layers)), max(0, width - name_width - memory_width - 11 - MIN_BAR))
        bar_width = max(4, width - name_width - 8 - (memory_width + 1) - (layers_width + 2 if layers_width else 0))
        lines = []
        for worker, name, used, items in zip(workers, names, memory, layers, strict=True):
            line = Text(f"{name:>{name_width}} ")
            load = worker.load or 0.0
            line.append(bar(load, bar_width, ascii_only=self._ascii), style="cyan" if load < 0.9 else "magenta")
            line.append(f" {number(worker.load, '6.1%'):>6} {used:>{memory_width}}")
            if layers_width:
                line.append(f"  {items if len(items) <= layers_width else items[: layers_width - 2] + '..'}")
            lines.append(line)
        return lines

    def _plan_lines(self) -> list[str]:
        """The next migration and event first, then the plans, newest first."""
        status = self.status
        lines = [line for line in (migration_line(status), event_line(status)) if line is not None]
        for plan in reversed(status.plans[-6:]):
            is_active = " (active)" if plan.plan_id == status.active_plan_id else ""
            reason = f": {plan.reason}" if plan.reason else ""
            lines.append(f"plan {plan.plan_id} {plan.result} at step {number(plan.step, ',')}{is_active}{reason}")
        return lines or ["no plans"]

    def _plans(self, width: int, rows: int) -> list[Text]:
        return self._some(self._plan_lines(), width, rows)

    def _events(self, width: int, rows: int) -> list[Text]:
        messages = list(reversed(self.status.events)) or ["no events"]
        if self.status.invalid_lines:
            messages.insert(0, f"{self.status.invalid_lines:,} lines of the run's files could not be read")
        if (incidents := incident_line(self.status)) is not None:
            messages.insert(0, incidents)
        return self._some(messages, width, rows)

    @staticmethod
    def _some(lines: Sequence[str], width: int, rows: int) -> list[Text]:
        return [Text(line if len(line) <= width else line[: width - 3] + "...") for line in lines[:rows]]


def _max_rows(sections: Sequence[_Section]) -> int:
    return sum(section.rows[-1] for section in sections)


def _memory(worker: WorkerStatus) -> str:
    if worker.peak_memory_bytes is None:
        return "-"
    used = worker.peak_memory_bytes / 1e9
    return f"{used:.1f} GB" if worker.memory_bytes is None else f"{used:.1f}/{worker.memory_bytes / 1e9:.0f} GB"


def _side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Two columns; the left one has ``width`` characters."""
    lines = []
    for at in range(max(len(left), len(right))):
        line = left[at].copy() if at < len(left) else Text()
        line = fit(line, width)
        line.pad_right(width - line.cell_len + _GAP)
        lines.append(line + right[at] if at < len(right) else line)
    return lines


def fit(line: Text, width: int, *, ascii_only: bool = False) -> Text:
    """The line as a terminal can show it.

    Args:
        line: a line; it may quote messages and file names.
        width: maximum number of columns.
        ascii_only: whether other characters are shown as ``?``.
    """
    # One character for one, so that the spans stay valid; control characters must not reach the terminal.
    shown = (character if character.isprintable() else " " for character in line.plain)
    clean = Text("".join("?" if ascii_only and not character.isascii() else character for character in shown))
    clean.style = line.style
    clean.spans = list(line.spans)
    clean.truncate(max(0, width))
    return clean
