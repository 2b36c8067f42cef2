r"""Words and sentence ends by script.

Most scripts separate words by spaces, Chinese and Japanese do not: each of their characters is a word here. Thai, Lao,
Khmer and Burmese do not either, and a word has several letters: a unit is a letter with its marks, and
``UNITS_PER_WORD`` of them count as a word. Text of Latin, Greek and Cyrillic letters is split as by ``\\\\w+``.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

# Han, kana, their iteration marks and half-width forms.
IDEOGRAPHS = (
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff"
)
# Thai, Lao, Burmese, Khmer.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\ua9e0-\ua9ff\uaa60-\uaa7f"
UNITS_PER_WORD = 4
# Scripts from Hebrew on, whose vowel signs and accents are characters of their own, which ``\w`` does not match.
_FIRST_MARK, _LAST_MARK = 0x0590, 0x1CFF
_HAS_OTHER = re.compile(f"[\u0590-\u1cff{IDEOGRAPHS}{UNSPACED}]")
_IS_UNSPACED = re.compile(f"[{UNSPACED}]")
_IS_UNIT = re.compile(f"[{UNSPACED}{IDEOGRAPHS}]")
SENTENCE_ENDS = ".!?"
# Full stops of other scripts end a sentence with or without a space after them.
OTHER_ENDS = (
    "\u3002\uff01\uff1f\uff0e\uff61\u061f\u06d4\u0964\u0965\u0589\u1362\u1367\u1368\u104b\u17d4\u17d5\u0f0d\u0f0e"
)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    marks = [code for code in range(_FIRST_MARK, _LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M"]
    mark = "".join(map(chr, marks))
    # Joiners are within words of Indic scripts and Persian.
    letter = f"[^\\W{IDEOGRAPHS}{UNSPACED}]"
    return re.compile(
        f"[{IDEOGRAPHS}]|(?=\\w)[{UNSPACED}](?:(?!\\w)[{UNSPACED}])*|{letter}(?:{letter}|[{mark}\u200c\u200d])*"
    )


_PLAIN_WORD = re.compile(r"\w+")


def word_spans(text: str) -> list[tuple[int, int]]:
    """The begin and end of each word of ``text``, in characters."""
    pattern = _word_pattern() if _HAS_OTHER.search(text) else _PLAIN_WORD
    return [found.span() for found in pattern.finditer(text)]


def words_of(text: str) -> list[str]:
    """The words of ``text``."""
    if not _HAS_OTHER.search(text):
        return _PLAIN_WORD.findall(text)
    return _word_pattern().findall(text)


def units_per_word(words: Sequence[str]) -> int:
    """The number of units that count as a word in a text of these units."""
    num_unspaced = sum(_IS_UNSPACED.match(word) is not None for word in words)
    return UNITS_PER_WORD if 2 * num_unspaced > len(words) else 1


def has_spaces(words: Sequence[str]) -> bool:
    """Whether spaces separate all of these words."""
    return not any(_IS_UNIT.match(word) for word in words)


def ends_clause(text: str, at: int) -> bool:
    """Whether the character at an offset ends a sentence; in scripts without full stops, a space does."""
    character = text[at]
    if character in SENTENCE_ENDS or character in OTHER_ENDS:
        return True
    return character.isspace() and at > 0 and _IS_UNSPACED.match(text[at - 1]) is not None
