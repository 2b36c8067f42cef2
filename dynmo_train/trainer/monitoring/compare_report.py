"""Two runs as one self-contained HTML file: losses, step times, layers and stages, balance, memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ..._common.document import DocumentError, parse_json
from ..._common.log_parts import read_part_lines
from ..._common.report import charts, facts
from ..._common.report.page import Block, Note, Page, Section, Table, Tile, shortened
from ..._common.report.run_data import RunData, read_run_files
from ..._common.report.units import NONE, count_text, digits, plural, share_text, size_text, time_text
from ...formats.profile import CONTINUES
from ...formats.profile_lines import line_problems
from .compare_runs import Comparison

MAX_LABEL = 40
"""Characters of the name of a run in legends and headings."""


def read_run_data(run: Path) -> RunData:
    """What a page shows of a run; lines of the profile that break a rule are left out."""
    data = read_run_files(run)
    try:
        invalid = _add_profile(data, run / "profile.jsonl")
    except DocumentError as error:
        data.notes.append(f"Costs of layers, loads and memory of {data.name} are missing: {error}.")
    else:
        if invalid:
            lines = f"{plural(invalid, 'line')} of its profile {'breaks' if invalid == 1 else 'break'} a rule"
            data.notes.append(f"{data.name}: {lines} and {'is' if invalid == 1 else 'are'} left out.")
    data.finish()
    return data


def _add_profile(data: RunData, path: Path) -> int:
    invalid = 0
    for line in read_part_lines(path):
        try:
            record = parse_json(line)
        except ValueError:
            invalid += 1
            continue
        if line_problems(record) or not _fits(record, data.header):
            invalid += 1
            continue
        if record.get(CONTINUES) and data.header:
            continue
        data.add_record(record)
    return invalid


def _fits(record: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    """Whether a step has one element per item and worker of its header."""
    if record["record"] != "step":
        return True
    if not header:
        return False
    items, workers = len(header["items"]), len(header["workers"])
    lengths = {name: len(value) for name, value in record.items() if isinstance(value, list)}
    of_workers = {"busy_ns", "peak_memory_bytes"}
    return all(length == (workers if name in of_workers else items) for name, length in lengths.items())


def _verdict(result: Comparison) -> tuple[str, str]:
    if result.identical:
        return "equal", "bit for bit, in all common steps"
    if result.losses is None:
        return "equal", f"gradient norms differ, first at step {result.first_difference:,}"
    return "differ", f"first at step {result.first_difference:,}"


def _tiles(result: Comparison) -> list[Tile]:
    value, note = _verdict(result)
    mean = f"{time_text(result.step_ms[0] * 1e6)} and {time_text(result.step_ms[1] * 1e6)}"
    steady = f"{time_text(result.steady_ms[0] * 1e6)} and {time_text(result.steady_ms[1] * 1e6)}"
    return [
        Tile(label="Losses", value=value, note=note),
        Tile(label="Ratio of mean step times", value=f"{result.ratio:.2f}", note=mean),
        Tile(label="Ratio after the last move", value=f"{result.ratio_steady:.2f}", note=steady),
        Tile(label="Tokens per second", value=count_text(result.tokens_per_s), note="of the second run"),
    ]


def _table(result: Comparison, runs: tuple[RunData, RunData], labels: list[str]) -> Table:
    def last_bubble(run: RunData) -> str:
        return share_text(facts.ends(run.bubble)[1])

    def peak(run: RunData) -> str:
        found = [value for vector in run.memory.means() for value in vector if value is not None]
        return size_text(max(found, default=None))

    def first_and_last(run: RunData) -> str:
        loss = run.losses.get("lm_loss")
        return f"{digits(loss.values[0])} to {digits(loss.values[-1])}" if loss is not None and len(loss) else NONE

    steady = f"median step time after step {result.steady_from:,}"
    rows = [
        *_head(runs),
        ["training loss, first to last step", *map(first_and_last, runs)],
        ["mean step time", *(time_text(ms * 1e6) for ms in result.step_ms)],
        [steady, *(time_text(ms * 1e6) for ms in result.steady_ms)],
        ["bubble in the last steps", *map(last_bubble, runs)],
        ["items moved", *(f"{count:,}" for count in result.moves)],
        ["bytes moved", *(size_text(count) for count in result.moved_bytes)],
        ["peak memory of a worker", *map(peak, runs)],
    ]
    return Table(columns=["", *labels], rows=rows, caption=f"{plural(result.steps, 'common step')}")


def _head(runs: tuple[RunData, RunData]) -> list[list[str]]:
    """The rows of the table on what ran."""
    found = [dict(facts.facts(run)) for run in runs]
    shown = ("Progress", "Run time", "Started", "Version and commit", "Pipeline")
    return [[name.lower(), *(each.get(name, NONE) for each in found)] for name in shown]


def compare_page(first: Path, second: Path, result: Comparison) -> Page:
    """The page of two runs.

    Args:
        first: run directory.
        second: run directory.
        result: their comparison.
    """
    runs = (read_run_data(first), read_run_data(second))
    labels = [shortened(run.name, MAX_LABEL) for run in runs]
    if labels[0] == labels[1]:
        labels = ["first", "second"]
    marks = charts.marks_of(runs, labels)
    own = [charts.marks_of([run], [""]) for run in runs]
    top = charts.cost_top(runs)
    layers: list[Block] = []
    loads: list[Block] = []
    memory: list[Block] = []
    for run, label, mine, name in zip(runs, labels, own, ("first", "second"), strict=True):
        layers.append(charts.layer_costs(run, runs, mine, name=f"layers-{name}", title=label, top=top))
        loads.append(charts.stage_loads(run, runs, mine, name=f"loads-{name}", title=f"Load of each stage: {label}"))
        memory.append(charts.peak_memory(run, runs, mine, name=f"memory-{name}", title=f"Peak memory: {label}"))
    sections = [
        Section(title="Comparison", blocks=[_table(result, runs, labels)]),
        Section(
            title="Loss and step time",
            blocks=[charts.compared_losses(runs, labels, marks), charts.compared_step_times(runs, labels, marks)],
        ),
        Section(title="Layers and stages", text="Cost of each layer; both runs have the same colors.", blocks=layers),
        Section(title="Balance", blocks=[*loads, charts.bubble(runs, labels, marks, name="bubble")]),
        Section(
            title="Workers and memory", blocks=[*memory, charts.workers_in_use(runs, labels, marks, name="workers")]
        ),
    ]
    notes = [note for run in runs for note in run.notes]
    if notes:
        sections.append(Section(title="Missing data", blocks=[Note(text=" ".join(notes))]))
    return Page(
        title=f"{labels[0]} and {labels[1]}",
        subtitle=facts.model_text(runs[0]),
        kind="Comparison of two runs",
        facts=(),
        tiles=_tiles(result),
        sections=sections,
        footer=f"Written by dynmo-train {__version__}. dynmo-plan report RUN adds plans and the timeline of a step.",
    )
