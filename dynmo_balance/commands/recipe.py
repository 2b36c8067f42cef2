"""``dynmo-plan recipe``: what balancing gives for a dynamic technique, under stated assumptions."""

from __future__ import annotations

from typing import Annotated

import typer

from ..console import Format, emit, emit_json, emit_table
from ..options import FormatOption


def recipe(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="pruning, freezing, moe, mod, early-exit, sparse-attention, or TOML files. Default: all."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search schedule, stages a worker, granularity and order as well.")
    ] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Speed-ups of the dynamic techniques: of balancing only, and of technique and balancing together.

    Each recipe states its assumptions; the published figures stand beside for comparison, not as a claim.
    """
    from ..recipes import cook, load_recipe, recipe_names

    recipes = [load_recipe(name) for name in names or recipe_names()]
    outcomes = [cook(one, searching=search) for one in recipes]
    if output_format is Format.JSON:
        emit_json([outcome.document() for outcome in outcomes])
        return
    for outcome in outcomes:
        emit(f"{outcome.recipe.name}:")
        for sentence in outcome.recipe.assumptions:
            emit(f"  - {sentence}")
    columns = ["recipe", "even split ms", "exact ms", "balancing only", "technique and balancing"]
    rows = [
        [
            outcome.recipe.name,
            f"{outcome.unbalanced_ns / 1e6:.1f}",
            f"{outcome.balanced_ns / 1e6:.1f}",
            f"{outcome.balancing_only:.2f} x",
            f"{outcome.technique_and_balancing:.2f} x",
            *(
                [
                    f"{outcome.baseline_ns / outcome.searched_ns:.2f} x",
                    f"{outcome.searched_ns / outcome.bound_ns:.3f}",
                    outcome.searched,
                ]
                if outcome.searched_ns and outcome.bound_ns
                else []
            ),
            "-" if outcome.recipe.published is None else f"{outcome.recipe.published:.2f} x",
        ]
        for outcome in outcomes
    ]
    extra = ["searched", "over the bound", "found"] if search else []
    emit_table("speed-ups", [*columns, *extra, "published"], rows)
