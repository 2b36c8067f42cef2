"""Resolve flags, file and defaults to a complete ``Config`` that records the source of each value."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from .._common.console import print_message
from .._common.document import MAX_CONFIG_BYTES, DocumentError, Problem, parse_toml
from .._common.errors import UsageError
from ..formats.input_text import read_input
from ..formats.os_errors import reason
from ..formats.private_text import without_credentials
from .compat.deepspeed import read_deepspeed
from .compat.torchtitan import torchtitan_advice
from .extensions import base_family, installed_options, package_techniques
from .options import DefaultContext, OptionSpec, Source, concern_specs
from .schema import Config

# Aliases of options in Megatron's scripts of one model family.
ALIASES = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "retriever_seq_length": "seq_length",
}
# Options of which one is required.
ALTERNATIVES = (("train_iters", "train_samples"), ("data_path", "train_data_path", "mock_data", "hf_dataset"))

# Defaults of required options in a dry run, which does not train.
DRY_RUN_VALUES: Mapping[str, Any] = {"data_path": "none", "train_iters": 1_000_000, "lr": 1e-4, "micro_batch_size": 1}
# Vocabulary sizes of GPT-2, BERT uncased and Llama 2.
PUBLISHED_VOCABULARIES = {"gpt": 50257, "bert": 30522, "ict": 30522, "t5": 30522, "llama": 32000}


def dry_run_values(family: str, flags: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults of a dry run; without vocabulary size and tokenizer file, the vocabulary size of the published model."""
    files = (flags.get(name) or file.get(name) for name in ("tokenizer_model", "vocab_file"))
    has_vocab = (
        flags.get("vocab_size") or file.get("vocab_size") or any(name and os.path.exists(name) for name in files)
    )
    values = {**DRY_RUN_VALUES, **({} if has_vocab else {"vocab_size": PUBLISHED_VOCABULARIES[base_family(family)]})}
    if flags.get("train_samples") or file.get("train_samples"):
        del values["train_iters"]
    if flags.get("hf_dataset") or file.get("hf_dataset"):
        del values["data_path"]
    return values


def dry_run_processes(flags: Mapping[str, Any], file: Mapping[str, Any]) -> int:
    """The world size of a dry run: ``--dry-run-processes``, else tensor x context x pipeline size."""
    given = dict(file) | {name: value for name, value in flags.items() if value is not None}
    sizes = (given.get(f"{axis}_parallel_size", 1) for axis in ("tensor_model", "context", "pipeline_model"))
    return int(given.get("dry_run_processes") or math.prod(sizes))


@cache
def built_in_concerns() -> dict[str, type]:
    """The dataclass of each concern of this package, in order."""
    hints = get_type_hints(Config)
    own = {name: spec.options for name, spec in package_techniques().items() if spec.options is not None}
    names = (entry.name for entry in fields(Config))
    return {name: hints[name] for name in names if name not in ("extensions", "sources")} | own


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
    """``config`` and ``config_sources`` of ``run.json``: by concern, option name to value and to source.

    URLs are without their credentials.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for spec in option_specs().values():
        value = getattr(config.concern(spec.concern), spec.name)
        values.setdefault(spec.concern, {})[spec.name] = without_credentials(value)
        sources.setdefault(spec.concern, {})[spec.name] = config.sources[spec.name]
    return {"config": values, "config_sources": sources}


def _unknown(name: str, table: str) -> Problem:
    known = [spec.name for spec in option_specs().values() if spec.is_flag]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    advice = f"; did you mean {near[0]}?" if near else ""
    key = f"{table}.{name}" if table else name
    torchtitan = torchtitan_advice(key)
    return Problem(key, "unknown", f"unknown option; {torchtitan}" if torchtitan else f"unknown option{advice}")


def _unknown_table(key: str, table: Mapping[str, Any]) -> list[Problem]:
    """Advice on each key of a table of torchtitan; for any other table, the names of ours."""
    if torchtitan_advice(key):
        return [_unknown(name, key) for name in table]
    return [Problem(key, "unknown", f"unknown table; must be one of {', '.join(concern_types())}")]


def _take(name: str, value: Any, table: str, taken: dict[str, Any], problems: list[Problem]) -> None:
    """Add a key of a file to ``taken``, or a problem to ``problems``."""
    spec = option_specs().get(name)
    if spec is None or not spec.is_flag:
        problems.append(_unknown(name, table))
    elif table and spec.concern != table:
        problems.append(Problem(f"{table}.{name}", "place", f"must be in the table [{spec.concern}]"))
    elif name in taken:
        problems.append(Problem(f"{table}.{name}" if table else name, "repeated", "is given twice; remove one"))
    else:
        taken[name] = value


def parse_config_file(text: str, source: str, more: Collection[str] = ()) -> dict[str, Any]:
    """Parse a TOML file of options: keys are option names, flat or in one table per concern.

    Args:
        text: contents of the file.
        source: name of the file, for messages.
        more: additional option names of the command, which are flat keys.

    Raises:
        DocumentError: not TOML, or unknown, misplaced or repeated keys; reports all of them.
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
                problems += _unknown_table(key, value)
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
    """Read and parse a TOML file of options.

    Raises:
        UsageError: it cannot be read, is not TOML, or has unknown keys.
    """
    try:
        text = read_input(path, MAX_CONFIG_BYTES)
    except DocumentError as error:
        raise UsageError(f"--config {path}: {reason(error)}; give the path of a TOML file") from error
    return parse_config_file(text, str(path), more)


def with_deepspeed(flags: Mapping[str, Any], file: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the options of ``--deepspeed-config`` into those of a ``--config`` file.

    ``--zero-stage 0`` is overridden by the DeepSpeed file: published scripts give both, and DeepSpeed uses the file.

    Args:
        flags: option name to value from the command line; None means not given.
        file: option name to value from a ``--config`` file.

    Returns:
        The flags and the merged file.

    Raises:
        DocumentError: the DeepSpeed file disagrees with flags or file; reports all disagreements.
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
        Problem(specs[name].flag, "conflict", f"is {given[name]}, but {value} in {path}; remove one")
        for name, value in values.items()
        if name in given and given[name] != value
    ]
    if problems:
        raise DocumentError("the configuration", problems)
    # Every process resolves the configuration; one of them reports.
    if found.ignored and os.environ.get("RANK", "0") == "0":
        print_message(f"{path}: ignored {', '.join(found.ignored)}")
    defaults = {name: value for name, value in found.defaults.items() if name not in given}
    if defaults and os.environ.get("RANK", "0") == "0":
        shown = ", ".join(specs[name].words_for(f"{value:g}") for name, value in defaults.items())
        print_message(f"{path}: defaults of DeepSpeed: {shown}")
    return dict(flags), defaults | dict(file) | values


def resolve(
    *,
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    command: Mapping[str, Any] | None = None,
    context: DefaultContext | None = None,
) -> Config:
    """Merge flags and file, fill in defaults and derived values, and check each value separately.

    Args:
        flags: option name to value from the command line; None means not given.
        file: option name to value from a ``--config`` file; flags have precedence.
        checkpoint: option name to value of the model of ``--load``; the file has precedence.
        command: option name to value, set by the subcommand.
        context: what derived defaults depend on.

    Raises:
        DocumentError: missing values, wrong types or values out of bounds; reports all of them.
    """
    context = context or DefaultContext()
    given: dict[str, tuple[Any, Source]] = {name: (value, "checkpoint") for name, value in (checkpoint or {}).items()}
    # Later sources replace earlier ones: checkpoint, file, flags, then what the subcommand sets.
    given |= {name: (value, "file") for name, value in (file or {}).items()}
    given |= {name: (value, "flag") for name, value in flags.items() if value is not None}
    given |= {name: (value, "command") for name, value in (command or {}).items()}
    own = {name for name, (_, source) in given.items() if source != "checkpoint"}
    given |= {name: given[other] for other, name in ALIASES.items() if other in given and name not in own}
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
            problems.append(Problem(spec.flag, "missing", f"is required: {spec.declaration.help}"))
    problems += [
        Problem(
            specs[first].flag,
            "missing",
            f"is required, or {' or '.join(specs[name].flag for name in others)}: {specs[first].declaration.help}",
        )
        for first, *others in ALTERNATIVES
        if not any(values.get(name) for name in (first, *others))
    ]
    if not problems:
        problems.extend(_derive(values, sources, replace(context, given=frozenset(given))))
    if problems:
        raise DocumentError("the configuration", sorted(problems, key=lambda problem: problem.kind != "missing"))
    concerns = {
        concern: kind(**{spec.name: values[spec.name] for spec in specs.values() if spec.concern == concern})
        for concern, kind in concern_types().items()
    }
    declared = {entry.name for entry in fields(Config)}
    extensions = {name: concerns.pop(name) for name in concern_types() if name not in declared}
    return Config(**concerns, extensions=extensions, sources=sources)


def _derive(values: dict[str, Any], sources: dict[str, Source], context: DefaultContext) -> list[Problem]:
    """Add derived values to ``values``, in order of declaration."""
    problems = []
    # The order matters: a derived default reads options that are declared before it, derived ones included.
    for spec in option_specs().values():
        derive = spec.declaration.derive
        if spec.name in values or derive is None:
            continue
        values[spec.name], sources[spec.name] = derive(values, context), "derived"
        if values[spec.name] is None:
            default = spec.declaration.derive_text
            problems.append(Problem(spec.flag, "missing", f"is required; its default is the {default}"))
    return problems


def config_of(context: DefaultContext | None = None, /, **values: Any) -> Config:
    """Create a ``Config`` from option values by name, for programs and tests."""
    return resolve(flags=values, context=context)
