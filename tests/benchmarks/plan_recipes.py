"""The six recipes (``dynmo_balance/recipes``) over several depths of their models, searched as well.

    python tests/benchmarks/plan_recipes.py [--layers 24,32,40,48] [--no-search]

For one recipe as it stands: ``dynmo-plan recipe NAME --search``. Each recipe states its assumptions; the columns are
those of ``dynmo_balance/recipes/recipe.py``, and "x bound" is the distance to what no schedule can be below.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynmo_balance._common.console import emit
from dynmo_balance.recipes.recipe import Recipe, load_recipe, recipe_names, run_recipe


def row(recipe: Recipe, layers: int, searching: bool) -> str:
    outcome = run_recipe(replace(recipe, spec=replace(recipe.spec, layers=layers)), searching=searching)
    searched = "- | -"
    if outcome.searched:
        searched = f"{outcome.searched.over_bound:.3f} | {outcome.searched.label}"
    steps = (outcome.uniform_ns, outcome.static_ns, outcome.balanced_ns, outcome.bound_ns)
    cells = [f"{step / 1e6:.1f}" for step in steps]
    cells += [f"{outcome.over_uniform:.2f}", f"{outcome.over_dense_optimal:.2f}"]
    cells += [f"{outcome.balanced_ns / outcome.bound_ns:.3f}", searched]
    cells += [f"{outcome.with_technique_over_uniform:.2f}", f"{outcome.with_technique:.2f}"]
    return f"| {recipe.name} | {layers} | {' | '.join(cells)} | up to {recipe.published:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="24,32,40,48")
    parser.add_argument("--no-search", action="store_true")
    options = parser.parse_args()
    emit(
        "| technique | layers | uniform ms | dense-optimal ms | balanced ms | bound ms | x uniform | x dense-optimal"
        " | x bound | searched x bound | found | with technique, x uniform | x dense-optimal | published |"
    )
    emit(f"|{'---|' * 14}")
    for name in recipe_names():
        for layers in options.layers.split(","):
            emit(row(load_recipe(name), int(layers), not options.no_search))


if __name__ == "__main__":
    main()
