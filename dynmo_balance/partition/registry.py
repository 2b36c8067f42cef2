"""The balancers by name: built-in ones, and those that other packages register.

A balancer is a function from a ``PartitionProblem`` to boundaries: the position of the first item of each stage,
followed by the number of items. ``(0, 4, 8)`` are two stages of four items. To add one, write the function in its own
file and add one line to ``_BUILT_IN``. Another package registers its own by an entry point::

    [project.entry-points."dynmo_balance.balancers"]
    my-balancer = "my_package.my_module:boundaries"

Nothing is imported before it is used, so this module is cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from .._common.document import short_repr
from .._common.errors import UsageError

if TYPE_CHECKING:
    from .problem import PartitionProblem

    Balancer = Callable[[PartitionProblem], tuple[int, ...]]

GROUP = "dynmo_balance.balancers"
_BUILT_IN: Mapping[str, str] = {
    "exact": "balance:exact_boundaries",
    "time": "by_weight:balance_time",
    "parameters": "by_weight:balance_parameters",
    "uniform": "uniform:boundaries",
    "deepspeed": "deepspeed:boundaries",
    "deepspeed_param": "deepspeed:boundaries_by_parameters",
    "deepspeed_static": "uniform:split_units_evenly",
    "diffusion": "diffusion:boundaries",
    "diffusion_param": "diffusion:boundaries_by_parameters",
}


@cache
def _entries() -> Mapping[str, EntryPoint]:
    """Every balancer by name, the built-in ones first.

    Raises:
        UsageError: a package registers a name that is built in, or that another package registers.
    """
    entries = {name: EntryPoint(name, f"{__package__}.{value}", GROUP) for name, value in _BUILT_IN.items()}
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        known = entries.get(entry.name)
        # A package may be found twice, such as an editable install next to a built one.
        if known is not None and known.value != entry.value:
            owner = "built in" if entry.name in _BUILT_IN else f"registered by {_package(known)}"
            raise UsageError(
                f"{_package(entry)} registers the balancer {entry.name!r}, which is {owner}; rename its entry point in"
                f" the group {GROUP}, or uninstall the package"
            )
        entries[entry.name] = entry
    return entries


def _package(entry: EntryPoint) -> str:
    """The package of an entry point, for messages."""
    return f"the package {entry.dist.name!r}" if entry.dist is not None else f"the module {entry.module!r}"


def balancer_names() -> tuple[str, ...]:
    """The names of all balancers, the built-in ones first."""
    return tuple(_entries())


def load_balancer(name: str) -> Balancer:
    """Import the balancer of this name.

    Raises:
        UsageError: no balancer has this name, or its package cannot be imported; the message names the package.
    """
    entry = _entries().get(name)
    if entry is None:
        raise UsageError(f"unknown balancer {name!r}; choose one of {', '.join(balancer_names())}")
    try:
        balancer: Balancer = entry.load()
    except Exception as error:  # another package's import may raise anything; a user needs its name, not a traceback
        raise UsageError(
            f"the balancer {name!r} of {_package(entry)} cannot be loaded from {entry.value!r}:"
            f" {type(error).__name__}: {error}; fix or uninstall the package"
        ) from error
    if not callable(balancer):
        raise UsageError(f"the balancer {name!r} of {_package(entry)} must be a function, is {short_repr(balancer)}")
    return balancer


def run_balancer(problem: PartitionProblem, name: str) -> tuple[int, ...]:
    """The boundaries that a balancer gives for a problem.

    Args:
        problem: the chain, the workers and the constraints.
        name: of the balancer.

    Returns:
        ``num_stages + 1`` item positions, from 0 to the number of items, in ascending order.

    Raises:
        UsageError: there is no such balancer, or it does not return such positions; the message names its package.
    """
    balancer = load_balancer(name)
    if name in _BUILT_IN:
        return balancer(problem)
    # Another package's result is checked: a wrong order of positions would assign items twice or not at all.
    package = _package(_entries()[name])
    try:
        found = tuple(int(position) for position in balancer(problem))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the balancer {name!r} of {package} failed: {type(error).__name__}: {error};"
            " set DYNMO_TRACEBACK=1 for the traceback"
        ) from error
    items = len(problem.chain.items)
    if (len(found), found[:1], found[-1:]) != (problem.num_stages + 1, (0,), (items,)) or list(found) != sorted(found):
        raise UsageError(
            f"the balancer {name!r} of {package} returned {short_repr(found)}:"
            f" must be {problem.num_stages + 1} positions in ascending order, from 0 to {items}"
        )
    return found
