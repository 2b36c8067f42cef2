"""The registries of dynamic techniques and model families, open to packages that are installed next to this one.

A technique or a family is one file and one line here. An outside package registers the same object as an entry point::

    [project.entry-points."dynmo_train.techniques"]
    layer_drop = "my_package:LAYER_DROP"            # a TechniqueSpec

    group                      object         loaded when
    dynmo_train.techniques     TechniqueSpec  a command needs the options of training
    dynmo_train.families       FamilySpec     its family is trained or read from a checkpoint
    dynmo_train.options        a dataclass    as techniques; further options, such as those of a family

``--help`` of a technique's options imports its module, so that module should import torch inside functions only.
Nothing here imports torch, and ``dynmo-train --help`` loads no entry point.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from .._common.console import print_message
from .._common.document import Problem
from .._common.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ..dynamics.technique import TechniqueBuilder
    from ..models.layer_list import BoundaryShape, ModelFamily
    from .schema import Config

# Balancers of dynmo-plan, which runs as a process of its own; further ones are entry points of BALANCER_GROUP.
BALANCERS = (
    *("exact", "time", "parameters", "uniform"),
    *("deepspeed", "deepspeed_param", "deepspeed_static", "diffusion", "diffusion_param"),
)
BALANCER_GROUP = "dynmo_balance.balancers"
TECHNIQUE_GROUP, FAMILY_GROUP, OPTION_GROUP = "dynmo_train.techniques", "dynmo_train.families", "dynmo_train.options"

# Techniques in the order in which their hooks are called. The options of these are in
# ``config/sections/techniques.py``, so that only the engine loads them.
CORE_TECHNIQUES: Mapping[str, str] = {
    "pruning": "dynmo_train.dynamics.pruning:TECHNIQUE",
    "freezing": "dynmo_train.dynamics.freezing:TECHNIQUE",
    "adaptive_freezing": "dynmo_train.dynamics.plasticity:TECHNIQUE",
    "token_selection": "dynmo_train.models.techniques.technique_blocks:TECHNIQUE",
}
# Techniques whose file has their options as well: name of the TOML table -> ``TechniqueSpec``.
TECHNIQUES: Mapping[str, str] = {"lora": "dynmo_train.dynamics.lora:TECHNIQUE"}
FAMILIES: Mapping[str, str] = {
    "gpt": "dynmo_train.models.families.gpt:FAMILY",
    "llama": "dynmo_train.models.families.llama:FAMILY",
    "bert": "dynmo_train.models.families.bert_tasks:FAMILY",
    "ict": "dynmo_train.models.families.ict:FAMILY",
    "t5": "dynmo_train.models.families.t5:FAMILY",
}
Loaded = TypeVar("Loaded")


@dataclass(frozen=True, kw_only=True)
class TechniqueSpec:
    """A dynamic technique: its options, and how it is built from them.

    Attributes:
        build: from a run's configuration to what builds the technique in the engine; None where its options leave it
            off. It may be None for a technique that only changes the model.
        options: a dataclass of ``option`` fields: flags, the TOML table of the technique's name, and a part of
            ``run.json``. ``config.options_of(options)`` returns the values.
        check: contradictions between the options of a run of that number of processes.
        wrap_family: the model of a run, changed; returns the family itself where the options leave the technique off.
        wrap_stored: the same for the ``model`` object of a checkpoint's manifest.
        wrap_boundary: the values that cross stage boundaries, with those that the technique adds.
    """

    build: Callable[[Config], TechniqueBuilder | None] | None = None
    options: type | None = None
    check: Callable[[Config, int], Iterator[Problem]] | None = None
    wrap_family: Callable[[Config, ModelFamily], ModelFamily] | None = None
    wrap_stored: Callable[[Mapping[str, Any], ModelFamily], ModelFamily] | None = None
    wrap_boundary: Callable[[Config, BoundaryShape], BoundaryShape] | None = None


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """A model family: how it is built from a configuration and from a checkpoint's manifest.

    Attributes:
        from_config: the model of a run.
        from_manifest: the model that the ``model`` object of a manifest describes.
        boundary: shapes of the values that cross a stage boundary; None is one residual stream ``[B, T, D]``.
        like: the built-in family whose samples, defaults and option rules this one shares.
    """

    from_config: Callable[[Config], ModelFamily]
    from_manifest: Callable[[Mapping[str, Any]], ModelFamily]
    boundary: Callable[[Config], BoundaryShape] | None = None
    like: str = "gpt"


def _points(group: str) -> list[EntryPoint]:
    """The installed entry points of a group, sorted by name."""
    from importlib.metadata import entry_points

    # Sorted: hosts may list installed packages in another order, and the hooks of techniques are called in this order.
    return sorted(entry_points(group=group), key=lambda point: point.name)


def _load_point(point: EntryPoint, kind: type[Loaded]) -> Loaded:
    """The object of an entry point; raises ``UsageError`` where its package is broken."""
    package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    try:
        loaded = point.load()
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(loaded, kind) and (kind is not type or is_dataclass(loaded)):
            return loaded
        problem = f"it is a {type(loaded).__name__}, not a {'dataclass' if kind is type else kind.__name__}"
    name = "NAME" if point.dist is None else point.dist.name
    raise UsageError(
        f"cannot load the entry point {point.name!r} ({point.group}) of {package}: {problem}; fix {point.value},"
        f" or remove the package: pip uninstall {name}"
    )


def _load_name(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _usable(group: str, kind: type[Loaded]) -> dict[str, Loaded]:
    """The objects of a group; rank 0 warns of those that cannot be loaded, whose options are then unknown."""
    found: dict[str, Loaded] = {}
    for point in _points(group):
        try:
            found[point.name] = _load_point(point, kind)
        except UsageError as error:
            if os.environ.get("RANK", "0") == "0":
                print_message(f"warning: {error}")
    return found


@cache
def package_techniques() -> Mapping[str, TechniqueSpec]:
    """The techniques of ``TECHNIQUES``, by name."""
    return {name: _load_name(place) for name, place in TECHNIQUES.items()}


@cache
def installed_techniques() -> Mapping[str, TechniqueSpec]:
    """The techniques of installed packages, by name."""
    return _usable(TECHNIQUE_GROUP, TechniqueSpec)


@cache
def installed_options() -> Mapping[str, type]:
    """Option dataclasses of installed packages, by the name of their TOML table."""
    declared = {name: spec.options for name, spec in installed_techniques().items() if spec.options is not None}
    return declared | _usable(OPTION_GROUP, type)


def technique_specs() -> dict[str, TechniqueSpec]:
    """All techniques, in the order in which their hooks are called: built-in ones first."""
    core: dict[str, TechniqueSpec] = {name: _load_name(place) for name, place in CORE_TECHNIQUES.items()}
    return core | dict(package_techniques()) | dict(installed_techniques())


@cache
def installed_families() -> Mapping[str, EntryPoint]:
    """The families of installed packages, by name; none of them is loaded."""
    return {point.name: point for point in _points(FAMILY_GROUP) if point.name not in FAMILIES}


@cache
def family_spec(name: str) -> FamilySpec:
    """The family of this name, built in or of an installed package.

    Raises:
        UsageError: no package has it, or the package that has it is broken.
    """
    if name in FAMILIES:
        spec: FamilySpec = _load_name(FAMILIES[name])
        return spec
    installed = installed_families()
    if name not in installed:
        known = ", ".join([*FAMILIES, *installed])
        raise UsageError(f"the model family {name!r} is not installed; install its package, or use one of {known}")
    spec = _load_point(installed[name], FamilySpec)
    if spec.like not in FAMILIES:
        raise UsageError(
            f"the model family {name!r} is like {spec.like!r}, which is not a built-in family; set FamilySpec.like to"
            f" one of {', '.join(FAMILIES)}"
        )
    return spec


def base_family(name: str) -> str:
    """The built-in family whose samples, defaults and option rules a family has; a built-in family's is itself."""
    return name if name in FAMILIES else family_spec(name).like


def balancer_names() -> tuple[str, ...]:
    """The balancers that the planner can use: its own and those of installed packages, none of which is loaded."""
    return (*BALANCERS, *(point.name for point in _points(BALANCER_GROUP)))
