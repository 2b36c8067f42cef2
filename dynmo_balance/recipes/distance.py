"""How far a recipe's step is from perfect: 1F1B at layer granularity, and the best that a search finds, over bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..auto import search
from ..bounds import Bounds
from ..formats.plan import CUSTOM
from ..partition import solve
from ..schedules import SCHEDULES
from ..simulate import predict
from . import Recipe, final_costs, problem_of


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Steps in ns at the end of a recipe's trajectory.

    Attributes:
        bounds: what no schedule and no partition can beat; ``work_ns`` is all work over all workers.
        plain_ns: 1F1B, exact partition, whole layers.
        found_ns: the best schedule, stages a worker, granularity and order of operations that was found.
        found: which.
    """

    recipe: Recipe
    bounds: Bounds
    plain_ns: int
    found_ns: int
    found: str

    def document(self) -> dict[str, Any]:
        """For a program."""
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


def distance_of(recipe: Recipe) -> Distance:
    """The distance of a recipe; a search takes some seconds at 8 workers."""
    header, _, last = final_costs(recipe)
    plain = problem_of(header, last, "layer")
    found = search(header, plain, (*SCHEDULES, CUSTOM), ("layer", "sublayer"))
    return Distance(
        recipe=recipe,
        bounds=found.bounds,
        plain_ns=predict(plain, solve(plain).boundaries).step_ns,
        found_ns=found.best.timeline.step_ns,
        found=found.best.label,
    )
