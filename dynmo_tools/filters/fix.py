"""Fix: the clean-up variants for data sets that need other care than ``clean`` gives.

The filters and repairs are those of Megatron's ``cleanup_fix_dataset`` and the variants in its comments. All that were
chosen run, the filters first: there the first repair that was chosen kept the others from running.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ..config.settings import FixSettings, FixTask
from ..runner.parts import MapWriter, map_phases
from ..runner.task import Phase, Task
from ..runner.task_manifest import TaskManifest
from .clean import language_detector, repair
from .language import LanguageDetector

SPACES_AND_BROKEN_LINES = re.compile(r"  +|\b\n+ |\b\n+")
BLANK_LINES = re.compile(r"\n\n+")
SPACED_SIGNS = (
    (" '", "'"), (" !", "!"), (" ?", "?"), (" .", "."), (" ,", ","), (" - ", "-"), (" @ ", "@"),
)  # fmt: skip


def drop_reason(text: str, tasks: Collection[FixTask], detector: LanguageDetector) -> str | None:
    """Which of the chosen filters leaves ``text`` out, if one does; lengths are in characters."""
    if FixTask.REMOVE_512 in tasks and len(text) < 512:
        return FixTask.REMOVE_512.value
    if FixTask.REMOVE_256_JAVASCRIPT in tasks and len(text) < 256 and "javascript" in text.lower():
        return FixTask.REMOVE_256_JAVASCRIPT.value
    if FixTask.REMOVE_512_NON_ENGLISH in tasks and len(text) < 512 and detector.detect(text) != "en":
        return FixTask.REMOVE_512_NON_ENGLISH.value
    return None


def repaired(text: str, tasks: Collection[FixTask]) -> str:
    """``text`` after the chosen repairs."""
    if FixTask.FTFY in tasks:
        text = repair(text)
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


def fix_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``fix``."""
    return map_phases(manifest, "filters.fix:fix")


def fix(task: Task) -> None:
    """Task function: one slice of documents, filtered and repaired."""
    settings: FixSettings = task.job.settings
    detector = language_detector(settings.seed)
    writer = MapWriter(task)
    for row, text in task.documents(settings.json_key, allow_surrogates=True):
        reason = drop_reason(text, settings.tasks, detector)
        if reason is not None:
            writer.drop(row, reason)
        else:
            writer.keep(row, settings.json_key, text, repaired(text, settings.tasks))
