"""Recipes: chains of steps where the output of one step is the input of the next; completed steps are reused.

    recipe.toml, --set ─> parse_recipe ─> Recipe ─> jobs_of ─> Job, Job, ... ─> run_job ─> pipeline-summary.json
                                                       ├─ documents: output of a step ─> input of the next
                                                       └─ tokenizer.json of train-tokenizer ─> binarize

A step runs again when its settings, or the size or date of an input changed.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .._common.document import (
    MAX_CONFIG_BYTES,
    parse_toml,
    read_text,
    short_repr,
)
from .._common.errors import UsageError
from ..config.options import files_of, from_mapping, parse_assignment
from ..formats.workfiles import PIPELINE
from ..io.atomic_write import sweep_temporaries
from ..io.paths import expand_inputs
from .job import Execution, Summary, run_job
from .registry import OutputKind, Step, default_work, steps
from .task_manifest import Job, Limits, Source

SUMMARY_NAME = "pipeline-summary.json"
RECORDS_ENDING = ".jsonl.zst"


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """One step of a recipe: its name in the recipe, the step that it runs, and its settings as written."""

    name: str
    step: Step
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The contents of a recipe file."""

    source: str
    inputs: tuple[str, ...]
    prefix: str
    steps: tuple[RecipeStep, ...]


def recipe_text(name: str) -> tuple[str, str]:
    """The text of a recipe and its origin: a file, or the name of a built-in recipe.

    Raises:
        UsageError: neither exists.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return read_text(path, MAX_CONFIG_BYTES), str(path)
    folder = resources.files("dynmo_tools") / "recipes"
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in known:
        raise UsageError(f"{name}: neither a recipe file (.toml) nor a built-in recipe; those are {', '.join(known)}")
    return (folder / f"{name}.toml").read_text(encoding="utf-8"), name


def parse_recipe(text: str, source: str, assignments: Sequence[str] = ()) -> Recipe:
    """Parse a recipe and apply ``step.key=value`` assignments.

    Args:
        text: TOML text of the recipe.
        source: origin of the text, for messages.
        assignments: values of ``--set``, which replace those of the recipe.

    Raises:
        UsageError: with the place and the violated rule.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{source}: invalid TOML: {error}") from error
    unknown = sorted(set(document) - {"pipeline", "step"})
    if unknown:
        raise UsageError(f"{source}: unknown keys {', '.join(unknown)}; a recipe has [pipeline] and [[step]] tables")
    header, listed = _tables(document, source)
    if strange := sorted(set(header) - {"input", "prefix"}):
        raise UsageError(f"{source}: unknown keys {', '.join(strange)} in [pipeline]; known keys are input, prefix")
    tables: dict[str, dict[str, Any]] = {}
    runs: dict[str, str] = {}
    for number, table in enumerate(listed, 1):
        run = table.pop("run", None)
        if not isinstance(run, str) or run not in steps():
            raise UsageError(f"{source}: step {number} runs {run!r}; known steps are {', '.join(steps())}")
        name = table.pop("name", run)
        if not isinstance(name, str):
            raise UsageError(f"{source}: step {number} has the name {short_repr(name)}; must be a text")
        if name in tables:
            raise UsageError(f'{source}: two steps are named {name!r}; rename one with name = "..."')
        tables[name], runs[name] = table, run
    if not tables:
        raise UsageError(f"{source}: no [[step]] table; add at least one")
    for text_ in assignments:
        name, key, value = parse_assignment(text_)
        if name not in tables:
            raise UsageError(f"--set {text_}: {name!r} is not a step of the recipe; its steps are {', '.join(tables)}")
        # A recipe may spell a key with either sign; both spellings together would be two values of one setting.
        tables[name].pop(key.replace("-", "_"), None)
        tables[name][key.replace("_", "-")] = value
    inputs, prefix = _inputs(header, source)
    return Recipe(
        source=source,
        inputs=inputs,
        prefix=prefix,
        steps=tuple(RecipeStep(name=n, step=steps()[runs[n]].check(), values=v) for n, v in tables.items()),
    )


def _inputs(header: Mapping[str, Any], source: str) -> tuple[tuple[str, ...], str]:
    """Inputs and prefix of ``[pipeline]``."""
    inputs, prefix = header.get("input", []), header.get("prefix", "data")
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(prefix, str) or not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise UsageError(f"{source}: input must be a text or a list of texts, and prefix a text")
    return tuple(inputs), prefix


def _tables(document: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """``[pipeline]`` and the ``[[step]]`` tables."""
    header, listed = document.get("pipeline", {}), document.get("step", [])
    if not isinstance(header, dict) or not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise UsageError(f"{source}: pipeline must be a table, [pipeline], and step an array of tables, [[step]]")
    return header, listed


def _output(recipe: Recipe, number: int, chosen: RecipeStep, folder: Path) -> Path:
    if chosen.step.output_kind is OutputKind.TOKENIZER:
        return folder / "tokenizer.json"
    if chosen.step.output_kind is OutputKind.DATASET:
        return folder / recipe.prefix
    if chosen.step.output_kind is OutputKind.PAIRS:
        return folder / f"{number:02d}-{chosen.name}.jsonl"
    return folder / f"{number:02d}-{chosen.name}{RECORDS_ENDING}"


def jobs_of(recipe: Recipe, inputs: Sequence[Path], folder: Path, limits: Limits) -> list[tuple[RecipeStep, Job]]:
    """The jobs of a recipe: documents are passed from step to step, a trained tokenizer to later steps.

    Args:
        recipe: the recipe.
        inputs: inputs of the first step; they may not exist if an earlier job writes them.
        folder: folder of all outputs.
        limits: limits of dividing and reading.

    Returns:
        Each step of the recipe with its job, in order. Nothing is written.

    Raises:
        UsageError: a setting is unknown or missing, or a file that no step writes does not exist.
    """
    jobs: list[tuple[RecipeStep, Job]] = []
    records, tokenizer = tuple(inputs), None
    for number, chosen in enumerate(recipe.steps, 1):
        values = dict(chosen.values)
        if tokenizer is not None and chosen.step.output_kind is OutputKind.DATASET:
            values.setdefault("tokenizer", str(tokenizer))
        settings = from_mapping(chosen.step.settings, values, f"{recipe.source}: step {chosen.name}")
        output = _output(recipe, number, chosen, folder)
        job = Job(
            step=chosen.step.name,
            inputs=records,
            output=output,
            work=default_work(output),
            settings=settings,
            limits=limits,
            package=chosen.step.package,
        )
        # Files are checked before the first step runs, which may take hours. Those of earlier steps do not exist yet.
        for path in files_of(settings):
            if path not in [earlier.output for _, earlier in jobs]:
                Source.of(path)
        jobs.append((chosen, job))
        if chosen.step.output_kind is OutputKind.RECORDS:
            records = (output,)
        elif chosen.step.output_kind is OutputKind.TOKENIZER:
            tokenizer = output
    return jobs


def inputs_of(recipe: Recipe, patterns: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """The files of ``patterns``, or those of the recipe, in the current directory or else in ``folder``.

    Raises:
        UsageError: there are no inputs, or both places have different files of one name.
    """
    found: list[str | Path] = list(patterns) or [_find_input(name, folder) for name in recipe.inputs]
    if not found:
        raise UsageError(f"{recipe.source}: no inputs; name them with --input")
    return expand_inputs(found)


def _find_input(name: str, folder: Path) -> str | Path:
    """An input of the recipe, in the current directory or else in the output folder."""
    escaped = Path(glob.escape(str(folder)), name)
    at = folder / name if (folder / name).exists() else escaped
    here, below = ({Path(one).resolve() for one in _matches(str(pattern))} for pattern in (name, at))
    if here and below and here != below:
        raise UsageError(
            f"{name}: exists in the current directory and in {folder}; choose with --input {name} or --input {at}"
        )
    return at if below else name


def _matches(pattern: str) -> list[str]:
    """The files that match a pattern, or the file of exactly this name."""
    return [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)


def run_pipeline(
    recipe: Recipe,
    inputs: Sequence[Path],
    folder: Path,
    limits: Limits,
    execution: Execution,
    report: Callable[[Summary], None],
) -> dict[str, Any]:
    """Run all steps and write ``pipeline-summary.json``.

    Args:
        recipe: the recipe.
        inputs: inputs of the first step.
        folder: folder for all outputs.
        limits: limits of reading.
        execution: how to run the steps.
        report: called after each step.

    Returns:
        The document of ``pipeline-summary.json``.

    Raises:
        UsageError: see ``jobs_of`` and ``run_job``.
        DynmoError: a step failed; the completed ones are reused by the next run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(recipe, inputs, folder, limits)
    summaries = []
    for chosen, job in jobs:
        summary = run_job(job, chosen.step.phases_of(), execution)
        report(summary)
        summaries.append((chosen.name, summary))
    document = {
        "recipe": recipe.source,
        **_totals(summaries, jobs),
        "steps": [{"name": name, **summary.as_json(), "reused": summary.reused} for name, summary in summaries],
    }
    sweep_temporaries(folder / SUMMARY_NAME)
    return PIPELINE.write(folder / SUMMARY_NAME, document)


def _totals(summaries: Sequence[tuple[str, Summary]], jobs: Sequence[tuple[RecipeStep, Job]]) -> dict[str, Any]:
    last = next(
        (
            s
            for (_, s), (c, _) in reversed(list(zip(summaries, jobs, strict=True)))
            if c.step.output_kind is not OutputKind.TOKENIZER
        ),
        summaries[-1][1],
    )
    tokenizer = next(
        (job.output for chosen, job in reversed(jobs) if chosen.step.output_kind is OutputKind.TOKENIZER), None
    )
    return {
        "documents_in": summaries[0][1].counts.documents_in,
        "bytes_in": summaries[0][1].counts.bytes_in,
        "documents_out": last.counts.documents_out,
        "documents_rejected": sum(summary.counts.num_rejected for _, summary in summaries),
        "tokens": last.facts.get("tokens"),
        "data_prefix": last.facts.get("data_prefix"),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "seconds": round(sum(summary.seconds for _, summary in summaries), 3),
    }
