"""The steps that commands and recipes run: built-in ones, and filters of other packages.

    built-in steps ────────────────┐
    BUILT_IN_FILTERS ──────────────┼─> steps() ─> commands of dynmo-prep, ``run = "NAME"`` in recipes
    entry points of other packages ┘

The code of a step is imported when the step runs. Only the modules of filters are imported earlier, for their settings.
An entry point that cannot be loaded becomes a step that reports the error and the package when it is used, so a broken
package does not disable the other commands.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .._common.errors import UsageError
from ..config.settings import (
    AddIdSettings,
    BinarizeChatSettings,
    BinarizeSettings,
    DecontaminateSettings,
    DedupSettings,
    ExtractWikiSettings,
    FindDuplicatesSettings,
    MergeSettings,
    RemoveDuplicatesSettings,
    RunSettings,
    ShuffleSettings,
    SplitSentencesSettings,
    TrainTokenizerSettings,
)

GROUP = "dynmo_tools.filters"
"""Entry-point group of filters: the name of the step, and its ``DocumentFilter`` class."""
FILTER_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
STEP_OPTIONS = frozenset({"inputs", "input_", "output", "work_dir", "format_"})
"""Options of every step that are not in ``RunSettings``."""


class OutputKind(StrEnum):
    """What the output of a step is."""

    RECORDS = "records"
    TOKENIZER = "tokenizer"
    DATASET = "dataset"
    PAIRS = "pairs"


@dataclass(frozen=True)
class NoSettings:
    """Settings of a step that cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: name of the command and in recipes.
        settings: dataclass of the settings; its docstring is the help of the command.
        phases: ``folder.module:function`` that makes the phases from a task manifest.
        output_kind: what the output is.
        output_help: help of ``--output``.
        output_names: further names of ``--output``.
        input_help: help of the inputs.
        entry_point: of a filter.
        package: name and version of the package that the filter comes from; empty for a built-in step.
        error: why the filter cannot be loaded; empty otherwise.
    """

    name: str
    settings: type
    phases: str
    output_kind: OutputKind = OutputKind.RECORDS
    output_help: str = "Output: JSON lines, compressed by the file name's extension (.gz, .xz, .bz2, .zst)."
    output_names: tuple[str, ...] = ()
    input_help: str = "Input files or patterns: JSON lines (.jsonl, .json), also .gz, .xz, .bz2, .zst, and .parquet."
    entry_point: EntryPoint | None = None
    package: str = ""
    error: str = ""

    @property
    def description(self) -> str:
        """The step in a message, with its package."""
        return f"filter {self.name!r} of the package {self.package}" if self.package else f"step {self.name!r}"

    def check(self) -> Step:
        """This step.

        Raises:
            UsageError: it cannot be loaded.
        """
        if self.error:
            raise UsageError(self.error)
        return self

    def phases_of(self) -> Callable[[Any], Sequence[Any]]:
        """The function that makes the step's phases from a task manifest.

        Raises:
            UsageError: the step cannot be loaded.
        """
        module, _, function = self.check().phases.partition(":")
        phases: Callable[[Any], Sequence[Any]] = getattr(importlib.import_module(f"dynmo_tools.{module}"), function)
        return phases

    def load_filter(self) -> Any:
        """The ``DocumentFilter`` class of a filter.

        Raises:
            UsageError: the filter cannot be loaded.
            ValueError: the step is not a filter.
        """
        if self.check().entry_point is None:
            raise ValueError(f"{self.name} is not a filter")
        return self.entry_point.load()  # type: ignore[union-attr]


MISSING_NAMES = "names_not_found"
"""Fact of a summary: the number of names of a file that no input has. The command then exits with code 3."""

BUILT_IN_FILTERS = {
    "clean": "dynmo_tools.filters.clean:CleanFilter",
    "fix": "dynmo_tools.filters.fix:FixFilter",
}

_STEPS = (
    Step(
        name="extract-wiki",
        settings=ExtractWikiSettings,
        phases="extract.wikipedia:extract_phases",
        input_help="MediaWiki XML dumps (.xml, also .bz2, .gz, .xz, .zst), or patterns.",
    ),
    Step(name="merge", settings=MergeSettings, phases="filters.merge:merge_phases", output_names=("--output_file",)),
    Step(name="add-id", settings=AddIdSettings, phases="filters.merge:add_id_phases"),
    Step(
        name="find-duplicates",
        settings=FindDuplicatesSettings,
        phases="dedup.steps:find_phases",
        output_kind=OutputKind.PAIRS,
        output_help="Pairs, one line per document: {name: [{name of a later one: Jaccard index}, ...]}.",
    ),
    Step(name="remove-duplicates", settings=RemoveDuplicatesSettings, phases="dedup.steps:remove_phases"),
    Step(name="dedup", settings=DedupSettings, phases="dedup.steps:dedup_phases"),
    Step(name="decontaminate", settings=DecontaminateSettings, phases="decontaminate.steps:decontaminate_phases"),
    Step(name="shuffle", settings=ShuffleSettings, phases="filters.shuffle:shuffle_phases"),
    Step(name="split-sentences", settings=SplitSentencesSettings, phases="tokenization.sentences:split_phases"),
    Step(
        name="train-tokenizer",
        settings=TrainTokenizerSettings,
        phases="tokenization.train_tokenizer:train_phases",
        output_kind=OutputKind.TOKENIZER,
        output_help="The tokenizer.json to write.",
    ),
    Step(
        name="binarize",
        settings=BinarizeSettings,
        phases="tokenization.binarize:binarize_phases",
        output_kind=OutputKind.DATASET,
        output_names=("--output-prefix",),
        output_help="PREFIX of the dataset; writes PREFIX_KEY_document.bin and .idx.",
    ),
    Step(
        name="binarize-chat",
        settings=BinarizeChatSettings,
        phases="tokenization.binarize_chat:binarize_chat_phases",
        output_kind=OutputKind.DATASET,
        output_names=("--output-prefix",),
        output_help="PREFIX of the dataset; writes PREFIX_chat_document and its .loss_mask.",
    ),
)


@functools.cache
def steps() -> Mapping[str, Step]:
    """All steps by name. Of two steps with one name, the built-in or first one counts; see ``name_conflicts``."""
    filters = [_filter_step(EntryPoint(name, value, GROUP)) for name, value in BUILT_IN_FILTERS.items()]
    known: dict[str, Step] = {}
    # Built-in steps come first: a package must not replace what a recipe means by ``clean``.
    for step in (*filters, *_STEPS, *_outside_filters()):
        known.setdefault(step.name, step)
    return known


def find_step(name: str) -> Step:
    """The step of a name.

    Raises:
        UsageError: no step has this name, or its package cannot be loaded.
    """
    if name not in steps():
        raise UsageError(f"{name!r} is not a step of dynmo-prep; known are {', '.join(steps())}")
    return steps()[name].check()


def name_conflicts(commands: Sequence[str]) -> list[str]:
    """A message for each filter of another package whose name is taken.

    Args:
        commands: names of commands that are not steps.
    """
    return [
        f"{step.description} is ignored: dynmo-prep has a command of this name; rename the entry point"
        for step in _outside_filters()
        if step.name in commands or steps()[step.name] is not step
    ]


@functools.cache
def _outside_filters() -> tuple[Step, ...]:
    # By name: the file system determines the order of installed packages, and the first of two equal names counts.
    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.dist.name if point.dist else ""))
    return tuple(map(_filter_step, found))


def _filter_step(point: EntryPoint) -> Step:
    """The step of a filter; one with an ``error`` if its class cannot be loaded or used."""
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
    settings: type = NoSettings
    output_names: tuple[str, ...] = ()
    error = ""
    try:
        loaded = point.load()
        settings, output_names = _checked_settings(point.name, loaded), loaded.output_names
    except Exception as fault:  # noqa: BLE001 - the code of another package may raise anything
        error = (
            f"filter {point.name!r} of the package {package} cannot be loaded from {point.value}: "
            f"{type(fault).__name__}: {fault}; update or uninstall the package"
        )
    return Step(
        name=point.name,
        settings=settings,
        phases="runner.parts:filter_phases",
        output_names=output_names,
        entry_point=point,
        package=package,
        error=error,
    )


def _checked_settings(name: str, loaded: Any) -> type:
    """The settings of a filter class.

    Raises:
        TypeError: the class or its settings do not have the form that ``filters/base.py`` describes.
    """
    base = importlib.import_module("dynmo_tools.filters.base")  # by name: imports go from filters to runner
    if not FILTER_NAME.fullmatch(name):
        raise TypeError("the name of the entry point must be lower-case words joined by hyphens")
    if not (isinstance(loaded, type) and issubclass(loaded, base.DocumentFilter)):
        raise TypeError("it is not a subclass of dynmo_tools.filters.base.DocumentFilter")
    settings = getattr(loaded, "settings_type", None)
    if not (isinstance(settings, type) and issubclass(settings, base.FilterSettings)):
        raise TypeError("its settings_type must be a subclass of dynmo_tools.filters.base.FilterSettings")
    # Fields of the settings and options of every step become flags of one command.
    taken = {field.name for field in dataclasses.fields(RunSettings)} | STEP_OPTIONS
    for field in dataclasses.fields(settings):
        if "help" not in field.metadata:
            raise TypeError(f"the field {field.name} of {settings.__name__} must be made by setting(..., help=...)")
        if field.name in taken:
            raise TypeError(f"the field {field.name} of {settings.__name__} is an option of every step; rename it")
    return settings


def default_work(output: Path) -> Path:
    """The default work folder of a run, next to its output: task manifest, parts, markers and rejects."""
    return output.with_name(output.name + ".work")
