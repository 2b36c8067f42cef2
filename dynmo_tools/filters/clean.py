"""Clean: repaired text, of one language, long enough. The rules are those of Megatron's ``cleanup_dataset``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._common.errors import MissingExtraError
from ..config.settings import CleanSettings, Engine
from ..runner.parts import MapWriter, map_phases
from ..runner.task import Phase, Task
from ..runner.task_manifest import TaskManifest
from .language import LanguageDetector

if TYPE_CHECKING:
    from ..tokenization.tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 8
FTFY_LINE_CHARACTERS = 1_000_000  # it cuts longer lines


ASCII_PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2035\u02bc\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u2036\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2043\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u2014\u2015\u2e3a\ufe58", " - "),
        **{chr(0xFF01 + at): chr(0x21 + at) for at in range(15)},
        **dict.fromkeys("\uff1a\ufe55", ":"),
        **dict.fromkeys("\uff1b\ufe54", ";"),
        **dict.fromkeys("\uff1f\ufe56", "?"),
        "\u2026": "...",
        "\u3001": ",",
        "\u3002": ".",
        "\u00a0": " ",
        "\u3000": " ",
    }
)


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """What becomes of a document: its repaired text, and why it is dropped, if it is."""

    text: str
    drop: str | None = None


def is_plain(text: str) -> bool:
    """Whether ftfy can change nothing: printable ASCII, tabs and newlines, without an ampersand."""
    if not text.isascii() or "&" in text:
        return False
    return text.isprintable() or text.replace("\n", " ").replace("\t", " ").isprintable()


@functools.lru_cache(maxsize=1)
def _fixers() -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Two fixers: ftfy as it is, and ftfy that leaves HTML entities as they are."""
    try:
        import ftfy
    except ImportError as error:
        raise MissingExtraError("ftfy", "prep") from error
    plain = ftfy.TextFixerConfig(explain=False)
    marked = plain._replace(unescape_html=False)
    return lambda text: str(ftfy.fix_text(text, plain)), lambda text: str(ftfy.fix_text(text, marked))


def repair(text: str) -> str:
    """``ftfy.fix_text``, which works line by line, on the lines that it could change.

    It resolves entities only as far as no ``<`` was met, which makes a text HTML.
    """
    if is_plain(text):
        return text
    fix, fix_marked = _fixers()
    lines = text.split("\n")
    if max(map(len, lines)) >= FTFY_LINE_CHARACTERS:
        return fix(text)
    html = False
    last = len(lines) - 1
    for at, line in enumerate(lines):
        html = html or "<" in line
        if not is_plain(line):
            segment = line if at == last else line + "\n"
            lines[at] = (fix_marked if html else fix)(segment)
        elif at != last:
            lines[at] = line + "\n"
    return "".join(lines)


def plain_punctuation(text: str) -> str:
    """``text`` with the signs of ``ASCII_PUNCTUATION`` in place of their typographic and full-width forms."""
    return text if text.isascii() else text.translate(ASCII_PUNCTUATION)


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
def language_detector(seed: int) -> LanguageDetector:
    """The judge for this seed, made once a process."""
    return LanguageDetector(seed)


@functools.lru_cache(maxsize=4)
def token_counter(tokenizer: Path | None) -> Callable[[str], int]:
    """The function that counts the tokens of a text: of a ``tokenizer.json``, or GPT-2's; loaded when first called."""

    @functools.lru_cache(maxsize=1)
    def load() -> Tokenizer:
        from ..tokenization.tokenizers import TokenizerFiles, built_in_gpt2, load_tokenizer, with_engine

        if tokenizer is None:
            return with_engine(built_in_gpt2(), Engine.AUTO, trusted=True)
        return load_tokenizer(TokenizerFiles(model=tokenizer))

    return lambda text: int(load().encode_batch([text]).lengths[0])


def clean_text(
    text: str, settings: CleanSettings, count: Callable[[str], int], detector: LanguageDetector | None
) -> CleanResult:
    """Decide on one document: the cheap tests first, the kept documents are the same in any order."""
    repaired = repair(text)
    if settings.punctuation:
        repaired = plain_punctuation(repaired)
    if not repaired.strip():
        return CleanResult(text=repaired, drop="empty")
    if is_short(repaired, settings.min_tokens, count):
        return CleanResult(text=repaired, drop="short")
    if detector is not None:
        found = detector.detect(repaired)
        if found is None:
            return CleanResult(text=repaired, drop="no-features")
        if found != settings.language:
            return CleanResult(text=repaired, drop="language")
    return CleanResult(text=repaired)


def clean_phases(manifest: TaskManifest) -> list[Phase]:
    """The phases of ``clean``."""
    return map_phases(manifest, "filters.clean:clean")


def clean(task: Task) -> None:
    """Task function: one slice of documents, cleaned."""
    settings: CleanSettings = task.job.settings
    detector = language_detector(settings.seed) if settings.language else None
    count = token_counter(settings.tokenizer)
    writer = MapWriter(task)
    for row, text in task.documents(settings.json_key, allow_surrogates=True):
        verdict = clean_text(text, settings, count, detector)
        if verdict.drop is not None:
            writer.drop(row, verdict.drop)
        else:
            writer.keep(row, settings.json_key, text, verdict.text)
