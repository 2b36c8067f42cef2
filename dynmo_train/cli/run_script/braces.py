"""Brace expansion of the shell: ``data/{a,b}_{0..3}`` is eight words; it precedes all other expansions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .syntax import Part, Place, Text, Word

MAX_WORDS, MAX_STEPS = 20_000, 1 << 21
_NUMBERS = re.compile(r"\{(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?\}")
_LETTERS = re.compile(r"\{([A-Za-z])\.\.([A-Za-z])\}")
# A word is a list of characters, which are literal and unquoted, and of parts, which are not examined.
_Atoms = list[str | Part]


def brace_words(word: Word, place: Place) -> list[Word]:
    """The words that the braces of a word become; the word itself without any.

    Args:
        word: a parsed word; quoted text and expansions are not examined.
        place: line of the script, for messages.

    Raises:
        ScriptError: they become too many words.
    """
    if not any(isinstance(part, Text) and not part.is_quoted and "{" in part.text for part in word):
        return [word]
    atoms: _Atoms = []
    for part in word:
        atoms += part.text if isinstance(part, Text) and not part.is_quoted else [part]
    found: list[Word] = []
    for expanded in _expanded(atoms, place, _Budget(MAX_STEPS, place)):
        found.append(_joined(expanded))
        if len(found) > MAX_WORDS:
            place.refuse(f"the braces become more than {MAX_WORDS:,} words; write fewer")
    return found


class _Budget:
    """Characters that may be examined and copied: text of many braces takes exponential time."""

    def __init__(self, steps: int, place: Place) -> None:
        self.steps, self.place = steps, place

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            self.place.refuse(f"the braces take more than {MAX_STEPS:,} steps; quote the word, or write fewer")


def _expanded(atoms: _Atoms, place: Place, budget: _Budget) -> Iterator[_Atoms]:
    """Expand the first braces with a comma or a range, and then what follows them."""
    for start, atom in enumerate(atoms):
        if atom != "{":
            continue
        found = _alternatives(atoms, start, place, budget)
        if found is None:
            continue
        choices, end = found
        for choice in choices:
            for inner in _expanded(choice, place, budget):
                for rest in _expanded(atoms[end:], place, budget):
                    yield [*atoms[:start], *inner, *rest]
        return
    budget.spend(len(atoms))
    yield atoms


def _alternatives(atoms: _Atoms, start: int, place: Place, budget: _Budget) -> tuple[list[_Atoms], int] | None:
    """The alternatives of the braces that open at ``start``, and the position after them; None for plain braces."""
    depth, choices, current = 0, list[_Atoms](), _Atoms()
    for at in range(start, len(atoms)):
        budget.spend(1)
        atom = atoms[at]
        depth += (atom == "{") - (atom == "}")
        if not depth:
            choices.append(current)
            if len(choices) > 1:
                return choices, at + 1
            text = "".join(one if isinstance(one, str) else "\0" for one in atoms[start : at + 1])
            numbers = _range(text, place)
            return None if numbers is None else ([list(number) for number in numbers], at + 1)
        if depth == 1 and atom == ",":
            choices.append(current)
            current = []
        elif at > start:
            current.append(atom)
    return None


def _range(text: str, place: Place) -> list[str] | None:
    """The texts of ``{FIRST..LAST}`` or ``{FIRST..LAST..STEP}``; None for other text."""
    if letters := _LETTERS.fullmatch(text):
        first, last = ord(letters[1]), ord(letters[2])
        step = 1 if last >= first else -1
        return [chr(code) for code in range(first, last + step, step)]
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        return None
    first, last = int(numbers[1]), int(numbers[2])
    step = max(1, abs(int(numbers[3] or 1))) * (1 if last >= first else -1)
    found = range(first, last + (1 if step > 0 else -1), step)
    if len(found) > MAX_WORDS:
        place.refuse(f"{text} is more than {MAX_WORDS:,} words; write a shorter range")
    # A leading zero pads all numbers to the same width: {01..10}.
    is_padded = any(re.match(r"-?0\d", end) for end in (numbers[1], numbers[2]))
    width = max(len(numbers[1]), len(numbers[2])) if is_padded else 0
    return [f"{number:0{width}d}" for number in found]


def _joined(atoms: _Atoms) -> Word:
    """The word of characters and parts."""
    parts: list[Part] = []
    plain = ""
    for atom in atoms:
        if isinstance(atom, str):
            plain += atom
            continue
        if plain:
            parts.append(Text(plain))
            plain = ""
        parts.append(atom)
    return (*parts, Text(plain)) if plain else tuple(parts)
