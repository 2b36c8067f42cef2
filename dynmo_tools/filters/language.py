"""Language detection with langdetect's results and a fixed seed, in less time.

langdetect provides the profiles, the constants and the rules for character n-grams; its detector is the reference of
the tests. It draws n-grams at random in seven trials and multiplies their probabilities until one language is certain.
Here, the n-grams of a word are computed once, the probabilities of a trial are one array, and the trials stop when the
remaining ones cannot change the result. The draws and the order of sums and products are those of langdetect.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._common.errors import MissingExtraError

# Entries of the cache of words. Text has new words without end, so the cache must have one.
MAX_WORDS = 200_000
# As langdetect: it normalizes the probabilities, and looks for convergence, at every fifth draw.
DRAWS_BETWEEN_CHECKS = 5
# Far above the rounding errors of seven sums of probabilities, far below any difference of languages that matters.
CERTAIN = 1e-9

Floats = npt.NDArray[np.float64]


class _Separators(dict[int, str]):
    """A table for ``str.translate`` that replaces word separators by spaces."""

    def __init__(self, normalize: Callable[[str], str]) -> None:
        super().__init__()
        self._normalize = normalize

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = " " if self._normalize(character) == " " else character
        return self[code]


class _NormalFormCache(dict[str, str]):
    """Cache of langdetect's normal form of each character."""

    def __init__(self, normalize: Callable[[str], str]) -> None:
        super().__init__()
        self._normalize = normalize

    def __missing__(self, character: str) -> str:
        self[character] = self._normalize(character)
        return self[character]


class _WordNgramCache(dict[str, tuple[int, ...]]):
    """Cache of the n-grams of each word; it is cleared when it is full."""

    def __init__(self, grams_of: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._grams_of = grams_of

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= MAX_WORDS:
            self.clear()
        self[word] = self._grams_of(word + " ")
        return self[word]


class LanguageDetector:
    """langdetect's detection with the same seed for each text.

    Args:
        seed: seed of the random draws.

    Raises:
        MissingExtraError: langdetect is not installed.
    """

    def __init__(self, seed: int) -> None:
        try:
            from langdetect import detector_factory
            from langdetect.detector import Detector
            from langdetect.lang_detect_exception import LangDetectException
            from langdetect.utils.ngram import NGram
            from langdetect.utils.unicode_block import unicode_block
        except ImportError as error:
            raise MissingExtraError("langdetect", "prep") from error
        factory = detector_factory.DetectorFactory()
        # langdetect reads the folder in the order of the file system, which decides the order of languages and, in the
        # last bit, of sums. Sorted, all machines agree.
        profiles = sorted(Path(detector_factory.PROFILES_DIRECTORY).iterdir())
        try:
            factory.load_json_profile([path.read_text(encoding="utf-8") for path in profiles])
        except LangDetectException as error:
            # Its bare except takes the exit on SIGTERM or on Ctrl-C for a damaged profile.
            if isinstance(error.__context__, (SystemExit, KeyboardInterrupt)):
                raise error.__context__ from None
            raise
        self._seed = seed
        self._rules: Any = Detector
        self._ngram: Any = NGram
        self._block: Callable[[str], str] = unicode_block
        self._languages: list[str] = factory.langlist
        self._rows = {gram: row for row, gram in enumerate(factory.word_lang_prob_map) if gram != " "}
        self._normal = _NormalFormCache(NGram.normalize)
        self._table: Floats = np.asarray(list(factory.word_lang_prob_map.values()))
        self._separators = _Separators(NGram.normalize)
        self._words = _WordNgramCache(self._grams_of_word)

    def detect(self, text: str) -> str | None:
        """The ISO 639-1 code of the most probable language; None for a text without letters."""
        grams = self._grams(self._only_letters_that_count(self._beginning(text)))
        if not grams:
            return None
        return self._decide(grams)

    def _beginning(self, text: str) -> str:
        """The first 10,000 characters after langdetect's replacements."""
        rules = self._rules
        if "http" in text:
            text = rules.URL_RE.sub(" ", text)
        if "@" in text:
            text = rules.MAIL_RE.sub(" ", text)
        if not text.isascii():
            text = self._ngram.normalize_vi(text)
        return text[:10_000]

    def _only_letters_that_count(self, text: str) -> str:
        """The text without Latin letters if letters of other scripts outnumber them two to one."""
        if text.isascii():
            return text
        latin = others = 0
        # By distinct characters: ``count`` runs in C, a loop over all characters does not. Sums of integers
        # are the same in any order of the set.
        for character in set(text):
            # As in langdetect, including the six signs between "Z" and "a".
            if "A" <= character <= "z":
                latin += text.count(character)
            elif character >= "\u0300" and self._block(character) != "Latin Extended Additional":
                others += text.count(character)
        if latin * 2 < others:
            return "".join(character for character in text if not "A" <= character <= "z")
        return text

    def _grams(self, text: str) -> list[int]:
        """The table rows of all n-grams of ``text`` that a profile contains, in order."""
        words = text.translate(self._separators).split(" ")
        last = words.pop()  # the only word without a trailing space
        found = list(itertools.chain.from_iterable(map(self._words.__getitem__, words)))
        found += self._grams_of_word(last)
        return found

    def _grams_of_word(self, word: str) -> tuple[int, ...]:
        """The table rows of a word's n-grams, by the rules of langdetect's ``NGram``; words in capitals have none."""
        normal, rows, longest = self._normal, self._rows, self._ngram.N_GRAM
        window, in_capitals, found = " ", False, []
        for each in word:
            character, last = normal[each], window[-1]
            if last == " ":
                window, in_capitals = " ", False
                if character == " ":
                    continue
            window = (window + character)[-longest:]
            in_capitals = character.isupper() and (in_capitals or last.isupper())
            if not in_capitals:
                for begin in range(len(window) - 1, -1, -1):
                    row = rows.get(window[begin:])
                    if row is not None:
                        found.append(row)
        return tuple(found)

    def _decide(self, grams: Sequence[int]) -> str | None:
        rules = self._rules
        # Seeded for each text, as in langdetect with a seed: a verdict does not depend on the texts before it, and
        # therefore not on slices and workers.
        draw = random.Random(self._seed)
        total: Floats = np.zeros(len(self._languages))
        trials = 7
        for trial in range(1, trials + 1):
            total += self._trial(grams, draw, rules) / trials
            first, second = np.partition(total, -2)[[-1, -2]]
            # A trial adds at most 1 / trials to a language: with a larger lead, the rest cannot change the result.
            left = (trials - trial) / trials
            if first - second > left + CERTAIN and first > rules.PROB_THRESHOLD:
                break
        best = int(total.argmax())
        return self._languages[best] if total[best] > rules.PROB_THRESHOLD else str(rules.UNKNOWN_LANG)

    def _trial(self, grams: Sequence[int], draw: random.Random, rules: Any) -> Floats:
        count = len(self._languages)
        weight = (rules.ALPHA_DEFAULT + draw.gauss(0.0, 1.0) * rules.ALPHA_WIDTH) / rules.BASE_FREQ
        shares: Floats = np.full(count, 1.0 / count)
        # langdetect checks after draw 0, 5, 10, ...: the first block has one draw.
        step, draws = 0, 1
        while True:
            block = self._table.take(_choices(draw, grams, draws), axis=0)
            block += weight
            # In the order of the draws: another order rounds differently, and a verdict may depend on the last bit.
            block[0] *= shares
            shares = np.multiply.reduce(block, axis=0)
            step += draws
            # Python's sum, as in langdetect; numpy adds in another order.
            listed = shares.tolist()
            whole = sum(listed)
            shares /= whole
            if max(listed) / whole > rules.CONV_THRESHOLD or step > rules.ITERATION_LIMIT:
                return shares
            draws = DRAWS_BETWEEN_CHECKS


def _choices(draw: random.Random, items: Sequence[int], count: int) -> list[int]:
    """``[draw.choice(items) for _ in range(count)]``: the same draws in a third of the time.

    ``choice`` draws the bit length of the count repeatedly, until the number is below the count.
    """
    found: list[int] = []
    length = len(items)
    bits, bits_of = length.bit_length(), draw.getrandbits
    while len(found) < count:
        at = bits_of(bits)
        if at < length:
            found.append(items[at])
    return found
