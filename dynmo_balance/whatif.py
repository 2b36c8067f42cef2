"""What if: predicted steps over a grid of stages, microbatches, schedules, sparsity and freezing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from .costs import ItemCosts
from .errors import UsageError
from .formats.profile import Header
from .freezing import frozen_costs
from .partition import uniform
from .partition.exact import solve
from .planning import chain_of
from .problem import InfeasibleError, Problem, places_of
from .repack import Packing, fewest
from .simulate import Timeline, predict
from .sparsity import SparsityModel, pruned_costs

AXES = {"stages": True, "microbatches": True, "sparsity": False, "freeze": False}
"""What can be varied, and whether it takes whole numbers only."""
MAX_CELLS = 20_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of the grid.

    Attributes:
        step_ns: of the exact partition; None where there is none, and ``reason`` says why.
        static_step_ns: of the uniform partition, whether or not it fits the memory.
        samples_per_s: of one data-parallel replica.
        from_static, from_balanced: the fewest workers that keep the stated share of that throughput.
    """

    stages: int
    microbatches: int
    sparsity: float
    freeze: float
    step_ns: int | None
    static_step_ns: int | None
    bottleneck_ns: int | None
    bubble_fraction: float | None
    samples_per_s: float | None
    from_static: Packing | None
    from_balanced: Packing | None
    reason: str = ""


class Grid:
    """Answers one cell after the other; equal questions are answered once."""

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
        self._schedule = schedule or header.schedule
        self._granularity = granularity
        self._memory_bytes = memory_bytes
        self._min_units = min_units
        self._costs = lru_cache(maxsize=None)(self._make_costs)
        self._balanced = lru_cache(maxsize=None)(self._solve)

    def _make_costs(self, sparsity: float, freeze: float) -> ItemCosts:
        costs = pruned_costs(self._header, self._dense, sparsity, self._model)
        return frozen_costs(self._header, costs, freeze)

    def _problem(self, stages: int, microbatches: int, sparsity: float, freeze: float) -> Problem:
        header = self._header
        return Problem(
            chain=chain_of(header, self._costs(sparsity, freeze), self._granularity),
            places=places_of(header, stages, self._memory_bytes),
            schedule=self._schedule,
            microbatches=microbatches,
            link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
            link_latency_ns=header.link.latency_ns if header.link else 0,
            min_units=self._min_units,
        )

    def _solve(self, stages: int, microbatches: int, sparsity: float, freeze: float) -> tuple[Timeline, int] | str:
        problem = self._problem(stages, microbatches, sparsity, freeze)
        try:
            solution = solve(problem)
        except (InfeasibleError, UsageError) as error:
            return str(error)
        return predict(problem, solution.boundaries), solution.bottleneck_ns

    def row(self, stages: int, microbatches: int, sparsity: float, freeze: float, keep: float) -> Row:
        """The cell at these values; ``keep`` is the share of the throughput that fewer workers must keep."""
        where = {"stages": stages, "microbatches": microbatches, "sparsity": sparsity, "freeze": freeze}

        def step_ns(count: int) -> int | None:
            found = self._balanced(count, microbatches, sparsity, freeze)
            return None if isinstance(found, str) else found[0].step_ns

        found = self._balanced(stages, microbatches, sparsity, freeze)
        if isinstance(found, str):
            return Row(
                **where,  # type: ignore[arg-type]
                step_ns=None,
                static_step_ns=None,
                bottleneck_ns=None,
                bubble_fraction=None,
                samples_per_s=None,
                from_static=None,
                from_balanced=None,
                reason=found,
            )
        timeline, bottleneck = found
        problem = self._problem(stages, microbatches, sparsity, freeze)
        static = predict(problem, uniform.boundaries(problem)).step_ns
        samples = microbatches * self._header.micro_batch_size
        return Row(
            **where,  # type: ignore[arg-type]
            step_ns=timeline.step_ns,
            static_step_ns=static,
            bottleneck_ns=bottleneck,
            bubble_fraction=timeline.bubble_fraction,
            samples_per_s=samples * 1e9 / timeline.step_ns if timeline.step_ns else None,
            from_static=fewest(stages, static, keep, step_ns),
            from_balanced=fewest(stages, timeline.step_ns, keep, step_ns),
        )


def rows(grid: Grid, header: Header, axes: Mapping[str, Sequence[float]], keep: float) -> list[Row]:
    """All cells of the grid; axes that are not varied stay as in the profile."""
    values = {
        "stages": [float(len(header.workers))],
        "microbatches": [float(header.microbatches)],
        "sparsity": [0.0],
        "freeze": [0.0],
        **axes,
    }
    cells = list(product(*(values[name] for name in AXES)))
    if len(cells) > MAX_CELLS:
        raise UsageError(f"the grid has {len(cells):,} cells; at most {MAX_CELLS:,}")
    if any(cell[0] < 1 or cell[1] < 1 for cell in cells):
        raise UsageError("stages and microbatches must be at least 1")
    return [grid.row(int(s), int(m), sparsity, freeze, keep) for s, m, sparsity, freeze in cells]


def headline(found: Sequence[Row]) -> str:
    """The answer in one sentence, for the most workers and the last values of the other axes."""
    usable = [row for row in found if row.step_ns is not None and row.from_balanced and row.from_static]
    if not usable:
        return "no cell of the grid has a feasible partition"
    most = max(row.stages for row in usable)
    row = [row for row in usable if row.stages == most][-1]
    where = f"{row.stages} stages, {row.microbatches} microbatches, sparsity {row.sparsity:g}, frozen {row.freeze:.0%}"
    return (
        f"{where}: {_give_back(row.stages, row.from_balanced, 'the balanced')};"
        f" {_give_back(row.stages, row.from_static, 'the static uniform')}"
    )


def _give_back(stages: int, packing: Packing | None, reference: str) -> str:
    if packing is None or packing.workers == stages:
        return f"no worker can be given back against {reference} pipeline"
    change = packing.kept - 1
    word = f"gain {change:.1%}" if change > 0 else f"lose {-change:.1%}"
    return f"give back {stages - packing.workers} of {stages} workers and {word} against {reference} pipeline"
