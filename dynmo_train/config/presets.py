"""Recipes: named configurations in the package, such as the sizes of published models."""

from __future__ import annotations

import difflib
from importlib import resources
from typing import Any

from .._common.document import parse_toml
from .._common.errors import UsageError
from .resolve import parse_config_file


def recipe_names() -> list[str]:
    """The names of all recipes, sorted."""
    folder = resources.files("dynmo_train.config") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str, family: str) -> dict[str, Any]:
    """Read the option values of a recipe.

    Args:
        name: name of the recipe.
        family: model family of the command.

    Raises:
        UsageError: unknown recipe, or a recipe of another family.
    """
    if name not in (names := recipe_names()):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"--recipe {name}: unknown recipe; {hint}available: {', '.join(names)}")
    text = (resources.files("dynmo_train.config") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    own = parse_toml(text).get("family", family)
    if own != family:
        raise UsageError(f"--recipe {name}: must have family {family}, is {own}; use pretrain {own}")
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("family = "))
    return parse_config_file(body, f"recipe {name}")
