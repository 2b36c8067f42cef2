"""The six recipes (``dynmo_balance/recipes``) over several depths of their models, searched as well.

    python tests/benchmarks/plan_recipes.py [--layers 24,32,40,48] [--no-search]

For one recipe as it stands: ``dynmo-plan recipe NAME --search``. Each recipe states its assumptions; the columns are
those of ``dynmo_balance/recipes/__init__.py``, and "x bound" is how far the searched step is from what no schedule can
beat.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynmo_balance._common.console import emit
from dynmo_balance.recipes.recipe import Recipe, load_recipe, recipe_names, run_recipe


def row(recipe: Recipe, layers: int, searching: bool) -> str:
    outcome = run_recipe(replace(recipe, spec=replace(recipe.spec, layers=layers)), searching=searching)
    searched = "- | - | -"
    if outcome.searched_ns and outcome.bound_ns:
        best = outcome.baseline_ns / outcome.searched_ns
        searched = f"{best:.2f} | {outcome.searched_ns / outcome.bound_ns:.3f} | {outcome.searched}"
    gains = f"{outcome.balancing_only:.2f} | {outcome.technique_and_balancing:.2f}"
    return f"| {recipe.name} | {layers} | {gains} | {searched} | {recipe.published:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="24,32,40,48")
    parser.add_argument("--no-search", action="store_true")
    options = parser.parse_args()
    emit("| technique | layers | balancing only | technique and balancing | searched | x bound | found | published |")
    emit("|---|---|---|---|---|---|---|---|")
    for name in recipe_names():
        for layers in options.layers.split(","):
            emit(row(load_recipe(name), int(layers), not options.no_search))


if __name__ == "__main__":
    main()
