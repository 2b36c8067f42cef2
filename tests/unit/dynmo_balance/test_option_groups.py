import inspect
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

import pytest
import typer

from dynmo_balance._common.option_groups import grouped


@dataclass(frozen=True, kw_only=True)
class Limits:
    memory: int = 1
    limits: str = "none"


def test_grouped_shows_fields_in_the_place_of_their_dataclass():
    def command(source: str, limits: Limits, step: int = 3) -> None: ...

    parameters = inspect.signature(grouped(command)).parameters
    assert [(name, each.default) for name, each in parameters.items()] == [
        ("source", inspect.Parameter.empty),
        ("memory", 1),
        ("limits", "none"),
        ("step", 3),
    ]


@dataclass(frozen=True, kw_only=True)
class TimeLimits(Limits):
    PANEL: ClassVar[str] = "Time"

    time_s: Annotated[int, typer.Option("--time-s")]


@dataclass(frozen=True, kw_only=True)
class JobLimits(TimeLimits):
    job: Annotated[str, typer.Option("--job")] = "dynmo"


def test_grouped_inherited_option_is_in_the_panel_of_its_class():
    def command(limits: JobLimits) -> None: ...

    parameters = inspect.signature(grouped(command)).parameters
    assert [(name, each.default) for name, each in parameters.items()] == [
        ("memory", 1),
        ("limits", "none"),
        ("time_s", inspect.Parameter.empty),
        ("job", "dynmo"),
    ]
    panels = {name: get_args(parameters[name].annotation)[1].rich_help_panel for name in ("time_s", "job")}
    assert panels == {"time_s": "Time", "job": None}


def test_grouped_field_with_the_name_of_its_group_is_passed():
    received = []

    def command(source: str, limits: Limits) -> None:
        received.append((source, limits))

    grouped(command)(source="in", memory=2, limits="all")
    assert received == [("in", Limits(memory=2, limits="all"))]


def test_grouped_options_of_the_same_name_are_refused():
    def command(memory: int, limits: Limits) -> None: ...

    with pytest.raises(TypeError, match="command: two options have the same name"):
        grouped(command)
