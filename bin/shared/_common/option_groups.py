"""Option dataclasses of a command line: related options are declared once, with their units, and passed as one value.

A command takes such a dataclass as a parameter; :func:`grouped` shows its fields to typer as single options::

    @grouped
    def compare(source: SourceArgument, pipeline: PipelineOptions, costs: CostOptions) -> None: ...

    dynmo-plan compare SOURCE --stages ... --microbatches ... --virtual-stages ... --window ... --at-step ...

The class attribute ``PANEL`` of a dataclass is the section of the options that it declares itself in help pages.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints


def in_panel(annotation: Any, panel: str | None) -> Any:
    """The annotation of an option, in a section of help pages unless it declares its own."""
    if panel is None or get_origin(annotation) is not Annotated:
        return annotation
    kind, option, *others = get_args(annotation)
    if getattr(option, "rich_help_panel", panel) is not None:
        return annotation
    option = copy.copy(option)  # several commands may share it
    option.rich_help_panel = panel
    return Annotated[(kind, option, *others)]


def _options_of(group: type) -> Iterator[tuple[str, Any, Any]]:
    """Name, default and annotation of each option of a dataclass and of its bases."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        declared_in = next(base for base in group.__mro__ if field.name in inspect.get_annotations(base))
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield field.name, default, in_panel(types[field.name], vars(declared_in).get("PANEL"))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its option dataclasses as parameters of their own, in their place.

    Raises:
        TypeError: two options have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[name] = kind
            single = list(_options_of(kind))
        else:
            single = [(name, parameter.default, kind)]
        parameters += [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for each, default, annotation in single
        ]

    names = [parameter.name for parameter in parameters]
    if len(set(names)) != len(names):
        raise TypeError(f"{command.__name__}: two options have the same name")

    @wraps(command)
    def flat(**values: Any) -> None:
        # A group may have the name of one of the options: all options leave before the first group is added.
        built = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **built)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the signature
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
