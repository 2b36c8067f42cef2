"""From what a person gave to a complete ``Config``, remembering where each value came from."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from .._common.console import say
from .._common.document import MAX_CONFIG_BYTES, DocumentError, Problem, parse_toml
from .._common.errors import UsageError
from ..formats.input_text import read_input
from ..formats.os_errors import reason
from .deepspeed import read_deepspeed
from .extensions import base_family, installed_options
from .options import Facts, OptionSpec, Source, concern_specs
from .schema import Config

# What Megatron calls an option in the scripts of one family.
OTHER_NAMES = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "retriever_seq_length": "seq_length",
}
# Options of which one must be given; the first is the usual one.
ALTERNATIVES = (("train_iters", "train_samples"), ("data_path", "train_data_path"))


# What a dry run need not be told: it trains nothing.
DRY_RUN_VALUES: Mapping[str, Any] = {"data_path": "none", "train_iters": 1_000_000, "lr": 1e-4, "micro_batch_size": 1}
# Of GPT-2, BERT uncased and Llama 2.
PUBLISHED_VOCABULARIES = {"gpt": 50257, "bert": 30522, "ict": 30522, "t5": 30522, "llama": 32000}


def dry_run_values(family: str, flags: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults of a dry run; the vocabulary is the published models' where no size and no tokenizer's file is there."""
    said = flags.get("vocab_size") or file.get("vocab_size")
    files = (flags.get(name) or file.get(name) for name in ("tokenizer_model", "vocab_file"))
    told = said or any(name and os.path.exists(name) for name in files)
    values = {**DRY_RUN_VALUES, **({} if told else {"vocab_size": PUBLISHED_VOCABULARIES[base_family(family)]})}
    if flags.get("train_samples") or file.get("train_samples"):
        del values["train_iters"]
    return values


def dry_run_processes(flags: Mapping[str, Any], file: Mapping[str, Any]) -> int:
    """The devices that a dry run stands for: those that are said, else tensor x pipeline parallel size."""
    given = dict(file) | {name: value for name, value in flags.items() if value is not None}
    sizes = (given.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    return int(given.get("dry_run_processes") or math.prod(sizes))


@cache
def built_in_concerns() -> dict[str, type]:
    """The dataclass of each concern of this package, in order."""
    hints = get_type_hints(Config)
    return {entry.name: hints[entry.name] for entry in fields(Config) if entry.name not in ("extensions", "sources")}


@cache
def built_in_specs() -> dict[str, OptionSpec]:
    """Every option of this package by its name, in order of declaration."""
    return {spec.name: spec for concern, kind in built_in_concerns().items() for spec in concern_specs(concern, kind)}


@cache
def installed_specs() -> dict[str, OptionSpec]:
    """The options that installed packages declare.

    Raises:
        UsageError: one of them has the name of a table or an option that exists.
    """
    found: dict[str, OptionSpec] = {}
    for concern, kind in installed_options().items():
        if concern in built_in_concerns():
            raise UsageError(
                f"the entry point {concern!r} ({kind.__module__}) has the name of the table [{concern}]; rename it, or"
                " remove its package"
            )
        for spec in concern_specs(concern, kind):
            if spec.name in built_in_specs() or spec.name in found:
                raise UsageError(
                    f"the entry point {concern!r} ({kind.__module__}) declares {spec.flag}, which exists; rename the"
                    " option, or remove its package"
                )
            found[spec.name] = spec
    return found


def concern_types() -> dict[str, type]:
    """The dataclass of each concern, in order: this package's, then those of installed packages."""
    return built_in_concerns() | dict(installed_options())


@cache
def option_specs() -> dict[str, OptionSpec]:
    """Every declared option by its name: this package's in order of declaration, then those of installed packages."""
    return built_in_specs() | installed_specs()


def config_document(config: Config) -> dict[str, Any]:
    """The ``config`` and ``config_sources`` of ``run.json``: per concern, option name to value and to origin."""
    values: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for spec in option_specs().values():
        values.setdefault(spec.concern, {})[spec.name] = getattr(config.concern(spec.concern), spec.name)
        sources.setdefault(spec.concern, {})[spec.name] = config.sources[spec.name]
    return {"config": values, "config_sources": sources}


def _unknown(name: str, table: str) -> Problem:
    known = [spec.name for spec in option_specs().values() if spec.is_flag]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    advice = f"; did you mean {near[0]}?" if near else ""
    return Problem(f"{table}.{name}" if table else name, "unknown", f"is not an option{advice}")


def _take(name: str, value: Any, table: str, taken: dict[str, Any], problems: list[Problem]) -> None:
    """Add one key of a file to ``taken``, or say why not."""
    spec = option_specs().get(name)
    if spec is None or not spec.is_flag:
        problems.append(_unknown(name, table))
    elif table and spec.concern != table:
        problems.append(Problem(f"{table}.{name}", "place", f"belongs to the table [{spec.concern}]"))
    elif name in taken:
        problems.append(Problem(f"{table}.{name}" if table else name, "repeated", "is given twice"))
    else:
        taken[name] = value


def parse_config_file(text: str, source: str, more: Collection[str] = ()) -> dict[str, Any]:
    """Option values of a TOML file: keys are option names, flat or in one table per concern.

    Args:
        text: of the file.
        source: its name.
        more: options of the command beyond those of training, as flat keys.

    Raises:
        DocumentError: not TOML, or keys that are unknown, misplaced or repeated; all of them at once.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise DocumentError(source, [Problem("", "toml", str(error))]) from error
    taken: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in document.items():
        if isinstance(value, dict):
            if key not in concern_types():
                tables = ", ".join(concern_types())
                problems.append(Problem(key, "unknown", f"is not a table of this file; the tables are {tables}"))
                continue
            for name, element in value.items():
                _take(name, element, key, taken, problems)
        elif key in more:
            taken[key] = value
        else:
            _take(key, value, "", taken, problems)
    if problems:
        raise DocumentError(source, problems)
    return taken


def read_config_file(path: Path, more: Collection[str] = ()) -> dict[str, Any]:
    """``parse_config_file`` of a file on disk; raises ``UsageError`` where it cannot be read."""
    try:
        text = read_input(path, MAX_CONFIG_BYTES)
    except DocumentError as error:
        raise UsageError(f"--config {path}: {reason(error)}; give the path of a TOML file") from error
    return parse_config_file(text, str(path), more)


def with_deepspeed(flags: Mapping[str, Any], file: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags, and the option values of a ``--config`` file with those of the DeepSpeed file that the options name.

    A ``--zero-stage`` of 0 gives way to the DeepSpeed file's: published scripts have both, and DeepSpeed reads it.

    Raises:
        DocumentError: the DeepSpeed configuration contradicts a flag or the file; every contradiction at once.
    """
    path = flags.get("deepspeed_config") or file.get("deepspeed_config")
    if path is None:
        return dict(flags), dict(file)
    found, specs = read_deepspeed(Path(path)), option_specs()
    if flags.get("zero_stage") == 0 and "zero_stage" in found.values:
        flags = {**flags, "zero_stage": None}
    given = dict(file) | {name: value for name, value in flags.items() if value is not None}
    values = {
        name: float(value) if specs[name].kind is float and type(value) is int else value
        for name, value in found.values.items()
    }
    problems = [
        Problem(specs[name].flag, "conflict", f"is {given[name]}, and {value} in {path}; give one of them")
        for name, value in values.items()
        if name in given and given[name] != value
    ]
    if problems:
        raise DocumentError("the configuration", problems)
    if found.unread and os.environ.get("RANK", "0") == "0":
        read = "batch, precision, ZeRO, optimizer, clipping and curriculum"
        say(f"{path}: read for {read}; not for {', '.join(found.unread)}")
    return dict(flags), dict(file) | values


def resolve(
    *,
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    command: Mapping[str, Any] | None = None,
    facts: Facts | None = None,
) -> Config:
    """Merge what was given, fill in defaults and derived values, check each value by itself.

    Args:
        flags: option name to value, of the command line; None means not given.
        file: the same of a ``--config`` file; the command line wins.
        command: values that the subcommand fixes.
        facts: the world that derived defaults depend on.

    Raises:
        DocumentError: missing, mistyped or out-of-range values; all of them at once.
    """
    facts = facts or Facts()
    given: dict[str, tuple[Any, Source]] = {name: (value, "file") for name, value in (file or {}).items()}
    given |= {name: (value, "flag") for name, value in flags.items() if value is not None}
    given |= {name: (value, "command") for name, value in (command or {}).items()}
    given |= {name: given[other] for other, name in OTHER_NAMES.items() if other in given and name not in given}
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    specs = option_specs()
    problems = [_unknown(name, "") for name in sorted(given.keys() - specs.keys())]
    for spec in specs.values():
        if spec.name in given:
            raw, sources[spec.name] = given[spec.name]
            values[spec.name], problem = spec.convert(raw)
            problems.extend([problem] if problem else [])
        elif spec.default is not MISSING:
            values[spec.name], sources[spec.name] = spec.default, "default"
        elif spec.required:
            problems.append(Problem(spec.flag, "missing", f"must be given: {spec.declaration.help}"))
    problems += [
        Problem(
            specs[first].flag, "missing", f"must be given, or {specs[second].flag}: {specs[first].declaration.help}"
        )
        for first, second in ALTERNATIVES
        if not values.get(first) and not values.get(second)
    ]
    if not problems:
        problems.extend(_derive(values, sources, replace(facts, given=frozenset(given))))
    if problems:
        raise DocumentError("the configuration", sorted(problems, key=lambda problem: problem.kind != "missing"))
    concerns = {
        concern: kind(**{spec.name: values[spec.name] for spec in specs.values() if spec.concern == concern})
        for concern, kind in concern_types().items()
    }
    extensions = {name: concerns.pop(name) for name in installed_options()}
    return Config(**concerns, extensions=extensions, sources=sources)


def _derive(values: dict[str, Any], sources: dict[str, Source], facts: Facts) -> list[Problem]:
    """Fill in the values that follow from others, in order of declaration; ``values`` holds all the rest."""
    problems = []
    for spec in option_specs().values():
        derive = spec.declaration.derive
        if spec.name in values or derive is None:
            continue
        values[spec.name], sources[spec.name] = derive(values, facts), "derived"
        if values[spec.name] is None:
            words = spec.declaration.derive_text
            problems.append(Problem(spec.flag, "missing", f"must be given, or follow from its default: {words}"))
    return problems


def config_of(facts: Facts | None = None, /, **values: Any) -> Config:
    """A ``Config`` from option values by name, with defaults for the rest: for programs and tests."""
    return resolve(flags=values, facts=facts)
