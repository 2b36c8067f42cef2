"""``dynmo-plan recipe``: the predicted speed-up of balancing for a dynamic technique, under stated assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_json, emit_table, print_message
from .._common.document import MAX_LAYERS, MAX_RANKS, MAX_STEPS
from .options import FormatOption

if TYPE_CHECKING:
    from ..recipes.optimality_gap import OptimalityGap
    from ..recipes.recipe import RecipeResult
    from ..recipes.sensitivity import SensitivityRow


def recipe(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Built-in recipes (pruning, freezing, moe, ...) or TOML files. Default: all."),
    ] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Also search schedule, stages per worker, granularity and order of operations."),
    ] = False,
    table: Annotated[
        bool,
        typer.Option(
            "--table", help="Print the gap to the lower bound, of 1F1B at layer granularity and of the best schedule."
        ),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Print the gains over the range of each parameter, and their sources."),
    ] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, max=MAX_LAYERS, help="Number of layers. Default: the recipe's.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help="Pipeline workers. Default: the recipe's.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="Table of dynmo-train measure-costs. Default: the recipe's own."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File to write one recipe to as a profile, for dynmo-train --emulate; must not exist."),
    ] = None,
    baseline_steps: Annotated[
        int, typer.Option(min=0, max=MAX_STEPS, help="Baseline steps at the start of the trace.")
    ] = 2,
    technique_steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Technique steps in the trace.")] = 8,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Predict the gain of balancing for the dynamic techniques, over two static partitions and next to the bound.

    The static partitions are uniform, and the exact one of the dense model. Each recipe states its assumptions.
    """
    from .._common.errors import UsageError
    from ..recipes.optimality_gap import measure_gap
    from ..recipes.recipe import load_recipe, recipe_names, run_recipe, with_size
    from ..recipes.sensitivity import sensitivity as rows_of
    from ..recipes.trace import write_trace

    # All recipes are read before the first one runs: an error in the last file must not cost minutes.
    recipes = [with_size(load_recipe(name, costs), layers, workers) for name in names or recipe_names()]
    if trace is not None:
        if len(recipes) != 1:
            raise UsageError(f"--trace: needs exactly one recipe, got {len(recipes)}; name one")
        write_trace(trace, recipes[0], baseline_steps, technique_steps)
        print_message(
            f"wrote {trace}: {baseline_steps} steps of the baseline, {technique_steps} of {recipes[0].technique}"
        )
        return
    if table:
        _print_gaps([measure_gap(one) for one in recipes], output_format)
        return
    if sensitivity:
        _print_sensitivity([row for one in recipes for row in rows_of(one)], output_format)
        return
    outcomes = [run_recipe(one, searching=search) for one in recipes]
    if output_format is Format.JSON:
        emit_json([outcome.document() for outcome in outcomes])
        return
    for outcome in outcomes:
        emit(f"{outcome.recipe.name}:")
        for sentence in outcome.recipe.assumptions:
            emit(f"  - {sentence}")
        if outcome.recipe.measured is not None:
            emit(f"  - measured on {outcome.recipe.measured.table.label}")
    columns = ["recipe", "uniform ms", "dense-optimal ms", "balanced ms", "bound ms"]
    columns += ["x uniform", "x dense-optimal", "x bound", "x 1F1B bound", "with technique", "published"]
    rows = [
        [
            outcome.recipe.name,
            *(
                f"{step / 1e6:.1f}"
                for step in (outcome.uniform_ns, outcome.static_ns, outcome.balanced_ns, outcome.bound_ns)
            ),
            f"{outcome.over_uniform:.2f}",
            f"{outcome.over_dense_optimal:.2f}",
            f"{outcome.balanced_ns / outcome.bound_ns:.3f}",
            f"{outcome.balanced_ns / outcome.partition_bound_ns:.3f}" if outcome.partition_bound_ns else "-",
            f"{outcome.with_technique_over_uniform:.2f} / {outcome.with_technique:.2f}",
            "-" if outcome.recipe.published is None else f"up to {outcome.recipe.published:.2f}",
        ]
        for outcome in outcomes
    ]
    emit_table("step with the technique, on static partitions and balanced", columns, rows)
    emit(
        "x bound: balanced step over the bound of any schedule and partition; x 1F1B bound: of any partition under 1F1B"
    )
    emit("x uniform, x dense-optimal: gain of balancing over the static partition of that name")
    emit("with technique: dense model on the uniform / its own exact partition over the balanced step")
    emit("published: over static training, of runs whose settings are not known")
    if search:
        _print_searches(outcomes)


def _print_searches(outcomes: list[RecipeResult]) -> None:
    """Print what the search found for each recipe, with the whole output layer and with shards."""
    rows = [
        [
            outcome.recipe.name,
            layer,
            f"{step.step_ns / 1e6:.1f}",
            f"{step.bound_ns / 1e6:.1f} ({step.limit})",
            f"{step.over_bound:.3f}",
            f"{step.over_order_bound:.3f}",
            step.label,
        ]
        for outcome in outcomes
        for layer, step in (("whole", outcome.searched), ("shards", outcome.sharded))
        if step is not None
    ]
    columns = ["recipe", "output layer", "searched ms", "bound ms", "x bound", "x order bound", "found"]
    emit_table("shortest step of any schedule, granularity and order of operations", columns, rows)
    emit("x order bound: over the bound of all orders of operations for the partition found")


def _print_sensitivity(found: list[SensitivityRow], output_format: Format) -> None:
    """Print one row per parameter and value, and the sources below."""
    if output_format is Format.JSON:
        emit_json([one.document() for one in found])
        return
    rows = [
        [
            one.result.recipe.name,
            one.parameter,
            f"{one.value:g}{' (recipe)' if one.is_recipe else ''}",
            f"{one.result.over_uniform:.2f}",
            f"{one.result.over_dense_optimal:.2f}",
            f"{one.result.balanced_ns / one.result.bound_ns:.3f}",
            f"{one.result.with_technique_over_uniform:.2f} / {one.result.with_technique:.2f}",
        ]
        for one in found
    ]
    columns = ["recipe", "parameter", "value", "x uniform", "x dense-optimal", "x bound", "with technique"]
    emit_table("gain of balancing over the range of each parameter", columns, rows)
    for recipe_name, parameter, source in dict.fromkeys(
        (one.result.recipe.name, one.parameter, one.source) for one in found
    ):
        emit(f"{recipe_name}, {parameter}: {source}")


def _print_gaps(gaps: list[OptimalityGap], output_format: Format) -> None:
    """Print one row per recipe."""
    if output_format is Format.JSON:
        emit_json([one.document() for one in gaps])
        return
    columns = ["recipe", "layers", "work ms", "bound ms", "1F1B ms", "x bound", "x work"]
    columns += ["found ms", "x bound", "x work", "found"]
    rows = [
        [
            one.recipe.name,
            str(one.recipe.spec.layers),
            f"{one.bounds.work_ns / 1e6:.1f}",
            f"{one.bounds.step_ns / 1e6:.1f}",
            *(
                figure
                for step in (one.plain_ns, one.found_ns)
                for figure in (
                    f"{step / 1e6:.1f}",
                    f"{step / one.bounds.step_ns:.3f}",
                    f"{step / one.bounds.work_ns:.3f}",
                )
            ),
            one.found,
        ]
        for one in gaps
    ]
    emit_table("gap to the lower bound", columns, rows)
