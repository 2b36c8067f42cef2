"""The steps that commands and recipes are made of. Light: a step's code is imported when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..config.settings import (
    AddIdSettings,
    BinarizeSettings,
    CleanSettings,
    DecontaminateSettings,
    DedupSettings,
    ExtractWikiSettings,
    FindDuplicatesSettings,
    FixSettings,
    MergeSettings,
    RemoveDuplicatesSettings,
    ShuffleSettings,
    SplitSentencesSettings,
    TrainTokenizerSettings,
)


class OutputKind(StrEnum):
    """What a step's output is."""

    RECORDS = "records"
    TOKENIZER = "tokenizer"
    DATASET = "dataset"
    PAIRS = "pairs"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its name on the command line and in recipes, its settings, where its phases are made.

    Attributes:
        name: of the command.
        settings: the dataclass of its settings; its docstring is the command's help.
        phases: ``folder.module:function`` that makes the phases from a plan.
        output_kind: what comes out.
        output_help: what ``--output`` names.
        output_names: further names of ``--output``.
        input_help: what the inputs are.
    """

    name: str
    settings: type
    phases: str
    output_kind: OutputKind = OutputKind.RECORDS
    output_help: str = "The output: JSON lines, compressed by the name's ending (.gz, .xz, .bz2, .zst)."
    output_names: tuple[str, ...] = ()
    input_help: str = "Input files or patterns: JSON lines (.jsonl, .json), also .gz, .xz, .bz2, .zst, and .parquet."

    def phases_of(self) -> Callable[[Any], Sequence[Any]]:
        """The function from a plan to the step's phases."""
        module, _, function = self.phases.partition(":")
        found: Callable[[Any], Sequence[Any]] = getattr(importlib.import_module(f"dynmo_tools.{module}"), function)
        return found


MISSING_NAMES = "names_not_found"
"""The fact that names of a file are in no input; the step ends with exit code 3."""

STEPS: Mapping[str, Step] = {
    step.name: step
    for step in (
        Step(
            name="extract-wiki",
            settings=ExtractWikiSettings,
            phases="extract.wikipedia:extract_phases",
            input_help="MediaWiki XML dumps (.xml, also .bz2, .gz, .xz, .zst), or patterns.",
        ),
        Step(
            name="merge", settings=MergeSettings, phases="filters.merge:merge_phases", output_names=("--output_file",)
        ),
        Step(name="add-id", settings=AddIdSettings, phases="filters.merge:add_id_phases"),
        Step(name="clean", settings=CleanSettings, phases="filters.clean:clean_phases"),
        Step(name="fix", settings=FixSettings, phases="filters.fix:fix_phases", output_names=("--output-path",)),
        Step(
            name="find-duplicates",
            settings=FindDuplicatesSettings,
            phases="dedup.steps:find_phases",
            output_kind=OutputKind.PAIRS,
            output_help="The pairs to write: {name: [{name of a later one: Jaccard index}, ...]}, a line for each.",
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
            output_help="PREFIX of the data set: PREFIX_KEY_document.bin and .idx are written.",
        ),
    )
}


def default_work(output: Path) -> Path:
    """The folder that a run keeps its plan, parts and rejects in: beside its output."""
    return output.with_name(output.name + ".work")
