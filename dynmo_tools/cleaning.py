"""Clean: repaired text, of one language, long enough. The rules are those of Megatron's ``cleanup_dataset``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MissingExtraError
from .joining import map_phases, records_kind
from .language import LanguageJudge
from .plan import Plan
from .records import encode_row, has_surrogates
from .settings import CleanSettings
from .tasks import Phase, Task

CHARACTERS_PER_TOKEN = 8
NEEDS_FTFY = re.compile(r"[^\t\n\x20-\x7e]|&")
# GPT-2's splitting rule: contractions, words, numbers and signs with the space before them, and other white space.
GPT2_PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a document: its repaired text, and why it is dropped, if it is."""

    text: str
    drop: str | None = None


def repair(text: str) -> str:
    """``ftfy.fix_text``, skipped where it could change nothing: printable ASCII without an ampersand."""
    if text.isascii() and not NEEDS_FTFY.search(text):
        return text
    try:
        import ftfy
    except ImportError as error:
        raise MissingExtraError("ftfy", "prep") from error
    fixed: str = ftfy.fix_text(text)
    return fixed


def count_pieces(text: str) -> int:
    """The number of pieces that GPT-2's rule splits ``text`` into: a lower bound of its number of GPT-2 tokens."""
    return sum(1 for _ in GPT2_PIECE.finditer(text))


def is_short(text: str, min_tokens: int, count: Callable[[str], int]) -> bool:
    """Whether ``text`` has fewer than ``min_tokens`` tokens, the end-of-document token included.

    Texts of at least ``8 * min_tokens`` characters pass uncounted, as they always did; a text of fewer bytes than
    tokens wanted is short whatever the tokenizer.
    """
    if len(text) >= CHARACTERS_PER_TOKEN * min_tokens:
        return False
    if len(text.encode("utf-8", "surrogatepass")) + 1 < min_tokens:
        return True
    return count(text) + 1 < min_tokens


@functools.lru_cache(maxsize=4)
def _judge(seed: int) -> LanguageJudge:
    return LanguageJudge(seed)


@functools.lru_cache(maxsize=4)
def _counter(tokenizer: Path | None) -> Callable[[str], int]:
    if tokenizer is None:
        return count_pieces
    from .tokenizers import TokenizerFiles, load_tokenizer

    loaded = load_tokenizer(TokenizerFiles(model=tokenizer))
    return lambda text: int(loaded.encode_batch([text]).lengths[0])


def judge(text: str, settings: CleanSettings, count: Callable[[str], int], languages: LanguageJudge | None) -> Verdict:
    """Decide on one document: the cheap tests first, the kept documents are the same in any order."""
    fixed = repair(text)
    if not fixed.strip():
        return Verdict(text=fixed, drop="empty")
    if is_short(fixed, settings.min_tokens, count):
        return Verdict(text=fixed, drop="short")
    if languages is not None:
        found = languages.detect(fixed)
        if found is None:
            return Verdict(text=fixed, drop="no-features")
        if found != settings.language:
            return Verdict(text=fixed, drop="language")
    return Verdict(text=fixed)


def replace_text(value: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """The document with ``text`` under ``key``, all other keys as and where they were."""
    if key in value or "." not in key:
        return {**value, key: text}
    first, _, rest = key.partition(".")
    return {**value, first: replace_text(value[first], rest, text)}


def clean_phases(plan: Plan) -> list[Phase]:
    """The phases of ``clean``."""
    return map_phases(plan, "cleaning:clean")


def clean(task: Task) -> None:
    """Task function: one slice of documents, cleaned."""
    settings: CleanSettings = task.job.settings
    languages = _judge(settings.seed) if settings.language else None
    count = _counter(settings.tokenizer)
    writer = task.create(task.part(records_kind(task)))
    for row, text in task.documents(settings.json_key, allow_surrogates=True):
        verdict = judge(text, settings, count, languages)
        if verdict.drop is not None:
            task.tally.drop(verdict.drop)
        elif has_surrogates(verdict.text):
            task.reject(row.line, row.offset, "surrogate", row.raw)
        elif verdict.text == text:
            task.keep(writer, row.raw)
        else:
            task.tally.changed += 1
            task.keep(writer, encode_row(replace_text(row.value, settings.json_key, verdict.text)))
