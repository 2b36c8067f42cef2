"""How the gain of a recipe depends on each of its parameters, over the range that its source leaves open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .recipe import Recipe, RecipeResult, run_recipe


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """The gains with another value of one parameter.

    Attributes:
        parameter: name in ``[script]``.
        value: of the parameter; all others are those of the recipe.
        is_recipe: whether the recipe has this value.
        source: of the range.
        result: steps and gains.
    """

    parameter: str
    value: float
    is_recipe: bool
    source: str
    result: RecipeResult

    def document(self) -> dict[str, Any]:
        """The row for JSON."""
        return {
            "parameter": self.parameter,
            "value": self.value,
            "is_recipe": self.is_recipe,
            "source": self.source,
            **self.result.document(),
        }


def parameter_of(recipe: Recipe, parameter: str) -> float:
    """The value that a recipe has for a parameter."""
    name, _, inner = parameter.partition(".")
    value = getattr(recipe.trajectory, name)
    return float(getattr(value, inner) if inner else value)


def with_parameter(recipe: Recipe, parameter: str, value: float) -> Recipe:
    """The recipe with another value of a parameter.

    Args:
        recipe: the recipe.
        parameter: a name of ``script_parameters``.
        value: its value.
    """
    trajectory = recipe.trajectory
    name, _, inner = parameter.partition(".")
    changes: dict[str, Any] = {name: replace(getattr(trajectory, name), **{inner: value}) if inner else value}
    return replace(recipe, trajectory=replace(trajectory, **changes))


def sensitivity(recipe: Recipe) -> list[SensitivityRow]:
    """The gains over the range of each parameter, the recipe's own value included.

    Args:
        recipe: with ranges.

    Raises:
        InfeasibleError: no partition satisfies the constraints.
    """
    rows = []
    for parameter, given in recipe.ranges.items():
        own = parameter_of(recipe, parameter)
        rows += [
            SensitivityRow(
                parameter=parameter,
                value=value,
                is_recipe=value == own,
                source=given.source,
                result=run_recipe(with_parameter(recipe, parameter, value)),
            )
            for value in sorted({own, *given.values})
        ]
    return rows
