"""Fix: alternative filters and repairs for particular corpora.

The filters and repairs are those of Megatron's ``cleanup_fix_dataset`` and of the variants in its comments. All chosen
ones run, filters first. In Megatron the first chosen repair disables the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.options import setting
from ..config.settings import MAX_SEED
from .base import DocumentFilter, FilterResult, FilterSettings
from .clean import language_detector, repair

if TYPE_CHECKING:
    from .language import LanguageDetector

# Megatron's ``general_cleaning``, unchanged: a newline is joined only after a word character, so that a paragraph that
# ends with a full stop stays one.
SPACES_AND_BROKEN_LINES = re.compile(r"  +|\b\n+ |\b\n+")
BLANK_LINES = re.compile(r"\n\n+")
# The ``stories`` variant of Megatron's comments, in its order: corpora of split words have spaces around these signs.
SPACED_SIGNS = (
    (" '", "'"), (" !", "!"), (" ?", "?"), (" .", "."), (" ,", ","), (" - ", "-"), (" @ ", "@"),
)  # fmt: skip


class FixTask(StrEnum):
    """Filters and repairs of ``fix``, in execution order."""

    REMOVE_512 = "remove_512"
    REMOVE_256_JAVASCRIPT = "remove_256_javascript"
    REMOVE_512_NON_ENGLISH = "remove_512_non_english"
    FTFY = "ftfy_fix_text"
    GENERAL = "general_cleaning"
    GUTENBERG = "gutenberg"
    REALNEWS = "realnews"
    STORIES = "stories"


@dataclass(frozen=True, kw_only=True)
class FixSettings(FilterSettings):
    """Run all chosen filters and repairs in a fixed order."""

    tasks: tuple[FixTask, ...] = setting(
        help="Tasks to run; repeat for several. Filters: remove_512 (below 512 characters), remove_256_javascript "
        "(below 256 characters and about javascript), remove_512_non_english (below 512 characters and not English). "
        "Repairs: ftfy_fix_text, general_cleaning (runs of spaces, line breaks after a word), gutenberg (runs of "
        "newlines become one blank line), realnews (each newline becomes a blank line), stories (spaces before signs)."
    )
    seed: int = setting(0, help="Seed of langdetect's random sampling.", minimum=0, maximum=MAX_SEED)
    save_dropped: Path | None = setting(
        None, output=True, names=("--filtered",), help="File for the dropped documents, with drop_reason."
    )


def drop_reason(text: str, tasks: Collection[FixTask], detector: LanguageDetector) -> str | None:
    """The chosen filter that drops ``text``, or None; lengths are in characters.

    Args:
        text: the text.
        tasks: chosen filters and repairs.
        detector: used by ``remove_512_non_english`` only.
    """
    # 256 and 512 characters are the limits of Megatron's cleanup_fix_dataset, and part of the names of its tasks.
    if FixTask.REMOVE_512 in tasks and len(text) < 512:
        return FixTask.REMOVE_512.value
    if FixTask.REMOVE_256_JAVASCRIPT in tasks and len(text) < 256 and "javascript" in text.lower():
        return FixTask.REMOVE_256_JAVASCRIPT.value
    if FixTask.REMOVE_512_NON_ENGLISH in tasks and len(text) < 512 and detector.detect(text) != "en":
        return FixTask.REMOVE_512_NON_ENGLISH.value
    return None


def repaired(text: str, tasks: Collection[FixTask]) -> str:
    """Apply the chosen repairs to ``text``."""
    if FixTask.FTFY in tasks:
        text = repair(text, normalize=True)  # the task has the name of the function, and its defaults
    if FixTask.GENERAL in tasks:
        text = SPACES_AND_BROKEN_LINES.sub(" ", text)
    if FixTask.GUTENBERG in tasks:
        text = BLANK_LINES.sub("\n\n", text)
    if FixTask.REALNEWS in tasks:
        text = text.replace("\n", "\n\n")
    if FixTask.STORIES in tasks:
        for spaced, plain in SPACED_SIGNS:
            text = text.replace(spaced, plain)
    return text


class FixFilter(DocumentFilter):
    """The step ``fix``."""

    settings_type = FixSettings
    repairs_surrogates = True
    output_names = ("--output-path",)

    def apply(self, text: str, document: Mapping[str, Any]) -> FilterResult:
        """Filter and repair one text."""
        reason = drop_reason(text, self.settings.tasks, language_detector(self.settings.seed))
        return FilterResult(text=text if reason else repaired(text, self.settings.tasks), drop_reason=reason)
