"""Clean: repair text, keep one language, drop short documents, by the rules of Megatron's ``cleanup_dataset``.

    text ─> ftfy ─> punctuation ─> empty? ─> short? ─> other language? ─> text to write
                                     └─────────┴───────────┴─ drop reason

With ``--normalize`` the verdicts and texts are those of Megatron's loop. The cost is not: texts that ftfy cannot change
are not given to it, texts of 8 characters per token are not tokenized, and short texts are dropped before their
language is detected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.document import MAX_SIZE
from .._common.errors import MissingExtraError, UsageError
from ..config.options import setting
from ..config.settings import MAX_SEED, Engine
from ..config.tokenizer_paths import tokenizer_in
from .base import DocumentFilter, FilterResult, FilterSettings

if TYPE_CHECKING:
    from ..tokenization.tokenizers import Tokenizer
    from .language import LanguageDetector

_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
LANGUAGES = tuple(_LANGUAGES.split())
"""Languages of langdetect."""
# Megatron's cleanup_dataset: ``len(text) < 8 * 128`` characters decides whether the tokens are counted.
CHARACTERS_PER_TOKEN = 8
# ftfy splits longer lines itself, at places that depend on its limit. Such a text is left to it as a whole.
FTFY_LINE_CHARACTERS = 1_000_000

# The ASCII sign for each: web text mixes both, and a tokenizer has different tokens for them.

ASCII_PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2035\u02bc\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u2036\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2043\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u2014\u2015\u2e3a\ufe58", " - "),
        # Full-width forms are ASCII plus 0xFEE0. The first 15 are punctuation; digits and letters stay.
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
class CleanSettings(FilterSettings):
    """Repair text, drop documents of other languages and short documents."""

    language: str = setting("en", help="Language to keep, by langdetect (ISO 639-1 code); '' keeps all.")
    min_tokens: int = setting(
        128,
        help="Minimum number of tokens; texts of 8 characters per token are not counted.",
        minimum=0,
        maximum=MAX_SIZE,
    )
    tokenizer: Path | None = setting(
        None, file=True, help="tokenizer.json that counts tokens, or its folder [default: GPT-2's]"
    )
    normalize: bool = setting(
        False, help="Also apply ftfy's normalization: straight quotes, half-width forms, ligatures, newlines, NFC."
    )
    punctuation: bool = setting(False, help="Replace typographic and full-width punctuation by ASCII.")
    seed: int = setting(0, help="Seed of langdetect's random sampling.", minimum=0, maximum=MAX_SEED)

    def __post_init__(self) -> None:
        """Refuse a language that langdetect does not know: every document would be dropped. Find the tokenizer."""
        if self.language and self.language not in LANGUAGES:
            raise UsageError(f"--language {self.language!r}: must be '' or one of {', '.join(LANGUAGES)}")
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", tokenizer_in(self.tokenizer))


def is_plain(text: str) -> bool:
    """Whether ftfy cannot change ``text``: printable ASCII, tabs and newlines, without ampersands."""
    # An ampersand may begin an HTML entity, a control character a terminal escape; ftfy replaces both.
    if not text.isascii() or "&" in text:
        return False
    return text.isprintable() or text.replace("\n", " ").replace("\t", " ").isprintable()


# Those of ftfy's defaults that change text without errors: full-width signs are the punctuation of Chinese and
# Japanese, curly quotes that of most languages. FineWeb-2 leaves them out, too.
NORMALIZATION_OFF: Mapping[str, Any] = {
    "fix_latin_ligatures": False,
    "fix_character_width": False,
    "uncurl_quotes": False,
    "fix_line_breaks": False,
    "normalization": None,
}


@functools.lru_cache(maxsize=2)
def _fixers(normalize: bool) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Two ftfy functions: with and without replacement of HTML entities."""
    try:
        import ftfy
    except ImportError as error:
        raise MissingExtraError("ftfy", "prep") from error
    plain = ftfy.TextFixerConfig(explain=False, **({} if normalize else NORMALIZATION_OFF))
    marked = plain._replace(unescape_html=False)
    return lambda text: str(ftfy.fix_text(text, plain)), lambda text: str(ftfy.fix_text(text, marked))


def repair(text: str, *, normalize: bool = False) -> str:
    """``ftfy.fix_text`` on the lines that it can change; ftfy works line by line.

    ftfy replaces entities only up to the first ``<``, which marks the text as HTML.

    Args:
        text: the text.
        normalize: apply all of ftfy's defaults, also those that change text without errors.
    """
    if is_plain(text):
        return text
    fix, fix_marked = _fixers(normalize)
    lines = text.split("\n")
    if max(map(len, lines)) >= FTFY_LINE_CHARACTERS:
        return fix(text)
    # From the first line with "<" on, ftfy takes a text for HTML: the decision is carried from line to line.
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
    """Replace typographic and full-width punctuation by ``ASCII_PUNCTUATION``."""
    return text if text.isascii() else text.translate(ASCII_PUNCTUATION)


def is_short(text: str, min_tokens: int, count: Callable[[str], int]) -> bool:
    """Whether ``text`` has fewer than ``min_tokens`` tokens, including the end-of-document token.

    Texts of at least ``8 * min_tokens`` characters are not counted, as in Megatron. A text with fewer bytes than
    ``min_tokens`` is short for every tokenizer.

    Args:
        text: the text.
        min_tokens: minimum number of tokens.
        count: returns the number of tokens of a text.
    """
    if len(text) >= CHARACTERS_PER_TOKEN * min_tokens:
        return False
    # A token has at least one byte, and one token is the end of the document.
    if len(text.encode("utf-8", "surrogatepass")) + 1 < min_tokens:
        return True
    return count(text) + 1 < min_tokens


@functools.lru_cache(maxsize=4)
def language_detector(seed: int) -> LanguageDetector:
    """The detector for a ``seed`` of its random draws; loaded once per process."""
    from .language import LanguageDetector

    return LanguageDetector(seed)


@functools.lru_cache(maxsize=4)
def token_counter(tokenizer: Path | None) -> Callable[[str], int]:
    """A function that counts the tokens of a text; the tokenizer is loaded by its first call.

    Args:
        tokenizer: a ``tokenizer.json``; None is the built-in tokenizer of GPT-2.
    """

    @functools.lru_cache(maxsize=1)
    def load() -> Tokenizer:
        from ..tokenization.definitions import built_in_gpt2
        from ..tokenization.tokenizers import TokenizerFiles, load_tokenizer, with_engine

        if tokenizer is None:
            return with_engine(built_in_gpt2(), Engine.AUTO, trusted=True)
        return load_tokenizer(TokenizerFiles(model=tokenizer))

    return lambda text: int(load().encode_batch([text]).lengths[0])


def clean_text(
    text: str, settings: CleanSettings, count: Callable[[str], int], detector: LanguageDetector | None
) -> FilterResult:
    """Repair one text and decide whether it is dropped. The cheap tests run first; their order changes no decision.

    Args:
        text: the text.
        settings: settings of the step.
        count: returns the number of tokens of a text.
        detector: detects the language; None keeps all languages.
    """
    text = repair(text, normalize=settings.normalize)
    if settings.punctuation:
        text = plain_punctuation(text)
    if not text.strip():
        return FilterResult(text=text, drop_reason="empty")
    if is_short(text, settings.min_tokens, count):
        return FilterResult(text=text, drop_reason="short")
    # Last: detection takes the most time of all tests, and reads repaired text as in Megatron.
    if detector is not None:
        language = detector.detect(text)
        if language is None:
            return FilterResult(text=text, drop_reason="no-features")
        if language != settings.language:
            return FilterResult(text=text, drop_reason="language")
    return FilterResult(text=text)


class CleanFilter(DocumentFilter):
    """The step ``clean``."""

    settings_type = CleanSettings
    # ftfy replaces lone surrogates, so their lines need not be rejected.
    repairs_surrogates = True

    def __init__(self, settings: CleanSettings) -> None:
        super().__init__(settings)
        self._detector = language_detector(settings.seed) if settings.language else None
        self._count = token_counter(settings.tokenizer)

    def apply(self, text: str, document: Mapping[str, Any]) -> FilterResult:
        """Clean one text."""
        return clean_text(text, self.settings, self._count, self._detector)
