"""Recipes: named configurations that come with the package, such as the sizes of published models."""

from __future__ import annotations

import difflib
from importlib import resources
from typing import Any

from .._common.document import parse_toml
from .._common.errors import UsageError
from .resolve import parse_config_file


def recipe_names() -> list[str]:
    """The names of all recipes."""
    folder = resources.files("dynmo_train.config") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str, family: str) -> dict[str, Any]:
    """The option values of a recipe, as of a ``--config`` file.

    Args:
        family: what is to be trained; a recipe that names a family is for that one.

    Raises:
        UsageError: no such recipe, or one of another family.
    """
    if name not in (names := recipe_names()):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"--recipe {name}: there is no such recipe; {hint}the recipes are {', '.join(names)}")
    text = (resources.files("dynmo_train.config") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    own = parse_toml(text).get("family", family)
    if own != family:
        raise UsageError(f"--recipe {name} is a {own}: write pretrain {own}, not pretrain {family}")
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("family = "))
    return parse_config_file(body, f"recipe {name}")
