"""The gap of a recipe's step to the lower bounds: of 1F1B at layer granularity, and of the best schedule found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..analysis.search import Candidate, search
from ..formats.plan import CUSTOM
from ..partition.exact import solve
from ..planning.plan_builder import problem_of_run
from ..schedules.registry import SCHEDULES
from ..simulation.bounds import Bounds
from ..simulation.simulator import predict
from .recipe import Recipe, final_costs


@dataclass(frozen=True, kw_only=True)
class OptimalityGap:
    """Steps in ns at the end of a recipe's trajectory.

    Attributes:
        recipe: the recipe.
        bounds: lower bounds for any schedule and partition; ``work_ns`` is total work over all workers.
        plain: 1F1B, exact partition, layer granularity.
        best: the best schedule, stages per worker, granularity and order of operations found.
    """

    recipe: Recipe
    bounds: Bounds
    plain: Candidate
    best: Candidate

    @property
    def plain_ns(self) -> int:
        """The step of ``plain``."""
        return self.plain.timeline.step_ns

    @property
    def found_ns(self) -> int:
        """The step of ``best``."""
        return self.best.timeline.step_ns

    @property
    def found(self) -> str:
        """A short description of ``best``."""
        return self.best.label

    def document(self) -> dict[str, Any]:
        """The gap for JSON."""
        return {
            "recipe": self.recipe.name,
            "layers": self.recipe.spec.layers,
            "workers": self.recipe.run.workers,
            "work_ns": self.bounds.work_ns,
            "bound_ns": self.bounds.step_ns,
            "plain_ns": self.plain_ns,
            "found_ns": self.found_ns,
            "found": self.found,
        }


def measure_gap(recipe: Recipe) -> OptimalityGap:
    """The gap of a recipe; a search takes some seconds at 8 workers."""
    # At layer granularity first: the difference to the best found then contains what finer cuts gain.
    header, _, last = final_costs(recipe)
    plain = problem_of_run(header, last, "layer")
    found = search(header, plain, (*SCHEDULES, CUSTOM), ("layer", "sublayer"))
    solution = solve(plain)
    timeline = predict(plain, solution.boundaries)
    return OptimalityGap(
        recipe=recipe,
        bounds=found.bounds,
        plain=Candidate(granularity="layer", problem=plain, solution=solution, timeline=timeline),
        best=found.best,
    )
