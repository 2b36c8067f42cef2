"""What-if sweeps: predicted steps over a grid of stages, microbatches, schedules and the dynamics of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from .._common.errors import UsageError
from ..costs.cost_window import ItemCosts, scaled
from ..costs.sparsity import PRUNED_KINDS, SparsityModel, pruned_costs
from ..formats.profile import Header
from ..inputs.problem_from_options import default_virtual_stages
from ..inputs.scenarios import depths_of, frozen_costs, hash_unit
from ..partition import uniform
from ..partition.balance import balance
from ..partition.problem import InfeasibleError, PartitionProblem, WorkerSlot, worker_slots
from ..planning.plan_builder import chain_of
from ..planning.repack import Packing, fewest_workers
from ..schedules.registry import SCHEDULES
from ..simulation.simulator import Timeline, predict
from .sweep_axes import Axis

AXES: Mapping[str, Axis] = {
    "stages": Axis(integers=True),
    "microbatches": Axis(integers=True),
    "schedule": Axis(choices=tuple(SCHEDULES)),
    "sparsity": Axis(),
    "freeze": Axis(),
    "skew": Axis(),
    "exit": Axis(),
    "speed": Axis(),
}
"""The axes of the grid."""
DYNAMIC = ("sparsity", "freeze", "skew", "exit")
NEUTRAL_DYNAMICS = {**dict.fromkeys(DYNAMIC, 0.0), "speed": 1.0}
"""Axes that are not chosen but happen to a run, with their neutral value."""
MAX_CELLS = 20_000
"""Each cell is a solved and simulated partition, and up to one more per smaller number of workers."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the grid.

    Attributes:
        stages, microbatches, schedule: of the pipeline.
        sparsity: share of the blocks' weights that are zero.
        freeze: share of the layers frozen, from the front.
        skew: extra time of the busiest experts; the share of each layer is fixed by its name.
        exit: the share of active tokens decreases as ``exp(-exit * depth)``, depth from 0 to 1.
        speed: of the last worker, relative to the profile.
    """

    stages: int
    microbatches: int
    schedule: str
    sparsity: float = 0.0
    freeze: float = 0.0
    skew: float = 0.0
    exit: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The prediction for one cell.

    Attributes:
        cell: the cell.
        step_ns: of the exact partition; None if there is none, see ``reason``.
        static_step_ns: of the uniform partition, whether or not it fits the memory.
        bottleneck_ns, bubble_fraction: of the exact partition.
        samples_per_s: of one data-parallel replica.
        peak_memory_bytes: maximum over workers.
        from_static, from_balanced: the fewest workers that keep the given share of that pipeline's throughput.
        pareto: whether no other cell of the same dynamics is as good in throughput, workers and memory.
        reason: why there is no partition.
    """

    cell: Cell
    step_ns: int | None = None
    static_step_ns: int | None = None
    bottleneck_ns: int | None = None
    bubble_fraction: float | None = None
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    from_static: Packing | None = None
    from_balanced: Packing | None = None
    pareto: bool = False
    reason: str = ""


def cell_costs(header: Header, dense: ItemCosts, cell: Cell, model: SparsityModel) -> ItemCosts:
    """The costs under the dynamics of the cell; ``dense`` are those without.

    Raises:
        UsageError: skew or exit is negative.
    """
    if cell.skew < 0 or cell.exit < 0:
        raise UsageError(f"skew and exit must not be negative, are {cell.skew} and {cell.exit}")
    depths = depths_of(header)
    factors = []
    for item, depth in zip(header.items, depths, strict=True):
        factor = math.exp(-cell.exit * depth) if item.kind in PRUNED_KINDS else 1.0
        if item.kind in ("mlp", "layer"):
            factor *= 1 + cell.skew * hash_unit(item.layer)
        factors.append(factor)
    costs = scaled(dense, factors) if cell.skew or cell.exit else dense
    costs = pruned_costs(header, costs, cell.sparsity, model)
    return frozen_costs(header, costs, cell.freeze)


def _slowed(slots: tuple[WorkerSlot, ...], speed: float) -> tuple[WorkerSlot, ...]:
    """The workers, the last one at ``speed`` times its speed."""
    last = replace(slots[-1], speed_ppm=max(1, round(slots[-1].speed_ppm * speed)))
    return (*slots[:-1], last)


class Grid:
    """Predicts cells; equal cells are simulated once."""

    def __init__(
        self,
        header: Header,
        dense: ItemCosts,
        *,
        model: SparsityModel,
        schedule: str | None = None,
        granularity: str | None = None,
        memory_bytes: int | None = None,
        min_units: int = 1,
    ) -> None:
        self._header = header
        self._dense = dense
        self._model = model
        self.schedule = schedule or header.schedule
        self._granularity = granularity
        self._memory_bytes = memory_bytes
        self._min_units = min_units
        # Per grid, and not as a decorator: a cache of the class would keep every grid alive. Cells of other sizes share
        # costs, and a release asks for cells that the grid has already.
        self._costs = lru_cache(maxsize=None)(self._make_costs)
        self._balanced = lru_cache(maxsize=None)(self._solve)

    def _make_costs(self, cell: Cell) -> ItemCosts:
        return cell_costs(self._header, self._dense, cell, self._model)

    def problem(self, cell: Cell) -> PartitionProblem:
        """The partitioning problem of the cell."""
        header = self._header
        # Costs depend on the dynamics alone; with the rest fixed, cells of other sizes find them in the cache.
        dynamics = replace(cell, stages=1, microbatches=1, schedule="", speed=1.0)
        return PartitionProblem(
            chain=chain_of(header, self._costs(dynamics), self._granularity),
            slots=_slowed(worker_slots(header, cell.stages, self._memory_bytes), cell.speed),
            schedule=cell.schedule,
            microbatches=cell.microbatches,
            virtual_stages=default_virtual_stages(header, cell.schedule),
            link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
            link_latency_ns=header.link.latency_ns if header.link else 0,
            min_units=self._min_units,
        )

    def _solve(self, cell: Cell) -> tuple[Timeline, int] | str:
        problem = self.problem(cell)
        try:
            solution = balance(problem, "exact")
        except (InfeasibleError, UsageError) as error:
            return str(error)
        return predict(problem, solution.boundaries), solution.bottleneck_ns

    def row(self, cell: Cell, keep: float) -> Row:
        """The prediction for a cell; ``keep`` is the share of the throughput that fewer workers must keep."""

        def step_ns(count: int) -> int | None:
            """The step on ``count`` workers; None if no partition is feasible."""
            # The slow worker is released first.
            speed = max(1.0, cell.speed) if count < cell.stages else cell.speed
            found = self._balanced(replace(cell, stages=count, speed=speed))
            return None if isinstance(found, str) else found[0].step_ns

        found = self._balanced(cell)
        if isinstance(found, str):
            return Row(cell=cell, reason=found)
        timeline, bottleneck = found
        problem = self.problem(cell)
        static = predict(problem, uniform.boundaries(problem)).step_ns
        samples = cell.microbatches * self._header.micro_batch_size
        return Row(
            cell=cell,
            step_ns=timeline.step_ns,
            static_step_ns=static,
            bottleneck_ns=bottleneck,
            bubble_fraction=timeline.bubble_fraction,
            samples_per_s=samples * 1e9 / timeline.step_ns if timeline.step_ns else None,
            peak_memory_bytes=max(timeline.peak_memory_bytes),
            from_static=fewest_workers(cell.stages, static, keep, step_ns),
            from_balanced=fewest_workers(cell.stages, timeline.step_ns, keep, step_ns),
        )


def _measures(row: Row) -> tuple[float, int, int]:
    # All three are better when lower, hence the sign of the throughput.
    return -(row.samples_per_s or 0.0), row.cell.stages, row.peak_memory_bytes or 0


def _dominated(row: Row, others: Sequence[Row]) -> bool:
    mine = _measures(row)
    return any(
        all(theirs <= own for theirs, own in zip(_measures(other), mine, strict=True)) and _measures(other) != mine
        for other in others
    )


def with_pareto(found: Sequence[Row]) -> list[Row]:
    """The rows with ``pareto`` set, among cells of the same dynamics."""
    # Dynamics happen to a run and cannot be chosen, so a cell is compared only with those that could replace it.
    groups: dict[tuple[float, ...], list[Row]] = {}
    for row in found:
        if row.step_ns is not None:
            groups.setdefault(tuple(getattr(row.cell, name) for name in NEUTRAL_DYNAMICS), []).append(row)
    return [
        row
        if row.step_ns is None
        else replace(
            row, pareto=not _dominated(row, groups[tuple(getattr(row.cell, name) for name in NEUTRAL_DYNAMICS)])
        )
        for row in found
    ]


def cells_of(grid: Grid, header: Header, axes: Mapping[str, Sequence[float | str]]) -> list[Cell]:
    """All cells of the grid; axes that are not varied are as in the profile.

    Raises:
        UsageError: there are too many cells, or a value is out of range.
    """
    values: dict[str, Sequence[float | str]] = {
        "stages": [len(header.workers)],
        "microbatches": [header.microbatches],
        "schedule": [grid.schedule],
        **{name: [neutral] for name, neutral in NEUTRAL_DYNAMICS.items()},
        **axes,
    }
    found = list(product(*(values[name] for name in AXES)))
    if len(found) > MAX_CELLS:
        raise UsageError(f"the grid has {len(found):,} cells; vary less, at most {MAX_CELLS:,} cells")
    cells = [_cell(dict(zip(AXES, cell, strict=True))) for cell in found]
    if any(cell.stages < 1 or cell.microbatches < 1 for cell in cells):
        raise UsageError("stages and microbatches must be at least 1")
    if wrong := sorted({cell.speed for cell in cells if cell.speed <= 0}):
        raise UsageError(f"speed must be above 0, is {wrong[0]:g}")
    return cells


def rows(grid: Grid, header: Header, axes: Mapping[str, Sequence[float | str]], keep: float) -> list[Row]:
    """The prediction for each cell of the grid.

    Args:
        grid: predicts cells.
        header: of the profile.
        axes: values of each varied axis.
        keep: share of the throughput that fewer workers must keep, in (0, 1].

    Raises:
        UsageError: there are too many cells, or a value is out of range.
    """
    return with_pareto([grid.row(cell, keep) for cell in cells_of(grid, header, axes)])


def _cell(values: Mapping[str, float | str]) -> Cell:
    return Cell(
        stages=int(values["stages"]),
        microbatches=int(values["microbatches"]),
        schedule=str(values["schedule"]),
        **{name: float(values[name]) for name in NEUTRAL_DYNAMICS},
    )


def headline(found: Sequence[Row], workers: int) -> str:
    """The result in one sentence, for the last values of the axes.

    Args:
        found: the grid.
        workers: of the run; a grid without this number is described by its most workers.
    """
    usable = [row for row in found if row.step_ns is not None and row.from_balanced and row.from_static]
    if not usable:
        return "no cell of the grid has a feasible partition"
    stages = {row.cell.stages for row in usable}
    of = workers if workers in stages else max(stages)
    row = [row for row in usable if row.cell.stages == of][-1]
    cell = row.cell
    dynamics = "".join(
        f", {name} {getattr(cell, name):g}"
        for name, neutral in NEUTRAL_DYNAMICS.items()
        if getattr(cell, name) != neutral
    )
    return (
        f"{cell.stages} stages, {cell.microbatches} microbatches, {cell.schedule}{dynamics}:"
        f" {_release_text(cell.stages, row.from_balanced, 'the balanced')};"
        f" {_release_text(cell.stages, row.from_static, 'the static uniform')}"
    )


def _release_text(stages: int, packing: Packing | None, reference: str) -> str:
    if packing is None or packing.workers == stages:
        return f"no worker can be released against {reference} pipeline"
    change = packing.throughput_fraction - 1
    change_text = f"gain {change:.1%}" if change > 0 else f"lose {-change:.1%}"
    return f"release {stages - packing.workers} of {stages} workers and {change_text} against {reference} pipeline"
