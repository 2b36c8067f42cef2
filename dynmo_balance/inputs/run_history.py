"""The history of a run: what a report shows of it, every plan with its result, and the newest costs.

One pass over the profile, line by line, so that memory does not grow with the length of the run::

    line --LineParser--> record --+--> RunData       charts, reduced while they are read
                                  +--> CostWindow    newest cost of each item
                                  +--> Windows       mean step before and after each move
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._common.document import DocumentError, Problem, parse_json
from .._common.errors import DynmoError
from .._common.log_parts import part_paths, read_part_lines
from .._common.report.run_data import RunData, read_run_files
from ..costs.cost_window import CostWindow
from ..formats.plan import Plan, header_problems, plan_numbers, plan_path, read_plan
from ..formats.profile import Event, Header, LineParser, PlanResult, Record, Step, Worker
from ..formats.profile_records import COST_NEUTRAL_EVENTS, with_speeds
from .profile_source import ProfileSource, costs_at_normal_speed, profile_path, warn_of_units


@dataclass(frozen=True, kw_only=True)
class PlanHistory:
    """A plan, its result, and the mean step in ns before and after its boundary; None if there were no steps."""

    plan: Plan
    result: PlanResult | None
    before_ns: int | None
    after_ns: int | None

    @property
    def realized(self) -> float | None:
        """The measured gain of the move, as a share of the step time."""
        if self.before_ns is None or self.after_ns is None or not self.before_ns:
            return None
        return 1 - self.after_ns / self.before_ns


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run and its plans.

    Attributes:
        data: what the charts show.
        header: of the newest segment, with the workers that were released before; None while the profile is empty.
        plan_histories: of all plans but the first.
        plans: by plan id.
        source: the newest costs; None while an item has none.
        without_costs: why there are none.
    """

    data: RunData
    header: Header | None
    plan_histories: tuple[PlanHistory, ...]
    plans: Mapping[int, Plan]
    source: ProfileSource | None
    without_costs: str = ""

    @property
    def moves(self) -> tuple[PlanHistory, ...]:
        """The plans that were applied."""
        return tuple(s for s in self.plan_histories if s.result is not None and s.result.result == "applied")


def read_plans(folder: Path, header: Header | None) -> dict[int, Plan]:
    """The plans that can be read and fit the header, by plan id."""
    plans = {}
    for number in plan_numbers(folder) if header is not None else []:
        try:
            plan = read_plan(plan_path(folder, number))
        except DynmoError:
            continue
        if header is not None and not header_problems(plan, header):
            plans[number] = plan
    return plans


class Windows:
    """The step times around each move.

    Args:
        size: steps before and after a move.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: dict[int, deque[int]] = {}
        self._before: dict[int, Mapping[int, Sequence[int]]] = {}
        self._after: dict[int, list[int]] = {}
        self.results: dict[int, PlanResult] = {}

    def add(self, record: Record) -> None:
        """Add the next record of the profile."""
        if isinstance(record, Step):
            self._recent.setdefault(record.plan_id, deque(maxlen=self._size)).append(record.step_ns)
            after = self._after.get(record.plan_id)
            if after is not None and len(after) < self._size:
                after.append(record.step_ns)
        elif isinstance(record, PlanResult):
            self.results[record.plan_id] = record
            if record.result == "applied":
                self._before[record.plan_id] = {number: tuple(recent) for number, recent in self._recent.items()}
                self._after[record.plan_id] = []
                self._recent.clear()

    def history(self, plan: Plan) -> PlanHistory:
        """A plan with its result and the steps around its boundary."""
        base = -1 if plan.base_plan_id is None else plan.base_plan_id
        before = self._before.get(plan.plan_id, {}).get(base, ())
        return PlanHistory(
            plan=plan,
            result=self.results.get(plan.plan_id),
            before_ns=_mean(before),
            after_ns=_mean(self._after.get(plan.plan_id, ())),
        )


def _mean(values: Sequence[int]) -> int | None:
    return sum(values) // len(values) if values else None


class _Pass:
    """The state of one pass over a profile."""

    def __init__(self, data: RunData, window: int) -> None:
        self.data, self.window = data, window
        self.windows = Windows(window)
        self.header: Header | None = None
        self.workers: dict[int, Worker] = {}
        self.costs = CostWindow(0, window)
        self.last: Step | None = None

    def add(self, record: Record, line: bytes) -> None:
        """Add the next record and its line, which has the envelope of a header."""
        self.windows.add(record)
        if isinstance(record, Header):
            self.header, self.last = record, None
            self.workers |= {worker.worker: worker for worker in record.workers}
            self.costs = CostWindow(len(record.items), self.window)
        elif isinstance(record, Step):
            self.costs.add(record)
            self.last = record
        elif isinstance(record, Event) and record.kind not in COST_NEUTRAL_EVENTS:
            self.header = None if self.header is None else with_speeds(self.header, record)
            self.costs.expire()
        self.data.add_record(parse_json(line) if isinstance(record, Header) else _document(record))

    @property
    def whole_header(self) -> Header | None:
        """The newest header with all workers that the run has had: plans from before a release fit it."""
        if self.header is None:
            return None
        return replace(self.header, workers=tuple(self.workers[each] for each in sorted(self.workers)))

    def source(self, path: Path, plans: Mapping[int, Plan]) -> ProfileSource | str:
        """The newest costs, or why there are none."""
        if self.header is None or self.last is None:
            return "the newest start of the run has recorded no step yet"
        warn_of_units(path, self.costs.records)
        plan = plans.get(self.last.plan_id)
        costs = costs_at_normal_speed(path, self.costs, self.header, plan)
        if costs is None:
            return (
                f"{self.costs.unsampled()} of {len(self.header.items)} items have no sample since the last change of"
                " costs"
            )
        return ProfileSource(path=path, header=self.header, costs=costs, plan=plan, last_step=self.last.step)


_KINDS = {Step: "step", Event: "event", PlanResult: "plan_result"}


def _document(record: Record) -> dict[str, Any]:
    return {"record": _KINDS.get(type(record), "plan_request"), **vars(record)}


def read_history(run: Path, window: int = 8) -> RunHistory:
    """Read a run directory or a profile.

    Args:
        run: the directory, or ``profile.jsonl``.
        window: steps before and after a move that are compared.

    Raises:
        DocumentError: the profile violates a rule, or there is neither a profile nor a ``run.json``.
    """
    path = profile_path(run)
    data = read_run_files(run)
    state, parser, problems = _Pass(data, window), LineParser(), list[Problem]()
    if part_paths(path) or not data.run:
        for line in read_part_lines(path):
            record, found = parser.parse(line)
            problems.extend(found)
            if record is not None and not problems:
                state.add(record, line)
    else:
        data.notes.append("There is no profile.jsonl: costs of layers, loads and plans are unknown.")
    if problems:
        raise DocumentError(str(path), problems)
    data.finish()
    header = state.whole_header
    plans = read_plans(run / "plans", header) if run.is_dir() else {}
    source = state.source(run, plans)
    return RunHistory(
        data=data,
        header=header,
        plan_histories=tuple(state.windows.history(plan) for number, plan in plans.items() if number > 0),
        plans=plans,
        source=None if isinstance(source, str) else source,
        without_costs=source if isinstance(source, str) else "",
    )
