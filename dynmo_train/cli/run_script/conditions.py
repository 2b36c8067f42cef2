"""Conditions of a shell script: ``test``, ``[ ]`` and ``[[ ]]``."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..published_scripts import find
from .syntax import Place

_FILE_TESTS: dict[str, Callable[[Path], bool]] = {
    "-e": Path.exists,
    "-f": Path.is_file,
    "-d": Path.is_dir,
    "-L": Path.is_symlink,
    "-h": Path.is_symlink,
    "-r": lambda path: os.access(path, os.R_OK),
    "-w": lambda path: os.access(path, os.W_OK),
    "-x": lambda path: os.access(path, os.X_OK),
    "-s": lambda path: path.exists() and path.stat().st_size > 0,
}
_NUMBER_TESTS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
_BINARY = frozenset({"=", "==", "!=", "<", ">", "=~", *_NUMBER_TESTS})
MAX_PATTERN, MAX_SUBJECT = 200, 1000


def _file_test(operator: str, operand: str, folder: Path) -> bool:
    if operator in ("-e", "-f", "-r", "-s") and operand.endswith(".py") and find(operand):
        return True  # scripts check that they run in a copy of Megatron-LM; its programs are ours
    try:
        return bool(operand) and _FILE_TESTS[operator](folder / operand)
    except (OSError, ValueError):
        return False


def _matches_regex(text: str, pattern: str, place: Place) -> bool:
    """``=~`` with a pattern that cannot take exponential time: no repeated group, few repetitions."""
    is_plain = re.fullmatch(r"\^?(?:[\w .,:/@%=-]|\\[.^$*+?()\[\]{}|]|\.|\[\^?[^\[\]]+\]|[*+?])*\$?", pattern)
    if not is_plain or len(pattern) > MAX_PATTERN or len(re.findall(r"[*+?]", pattern)) > 4 or len(text) > MAX_SUBJECT:
        place.refuse(f"the regular expression {pattern[:80]!r} is not interpreted; use == with a pattern")
    try:
        return re.search(pattern, text) is not None
    except re.error:
        place.refuse(f"{pattern[:80]!r} is not a regular expression; correct it")


class _Test:
    """A recursive-descent evaluation of the tokens of a condition.

    Args:
        words: strings; in ``[[``, pairs of a string and its pattern.
        folder: working folder of the script.
        integer: evaluates an arithmetic expression.
        is_set: whether a variable is set, for ``-v``.
        place: line of the script.
    """

    def __init__(
        self,
        words: Sequence[tuple[str, str, bool]],
        folder: Path,
        integer: Callable[[str], int],
        is_set: Callable[[str], bool],
        place: Place,
        *,
        has_patterns: bool,
    ) -> None:
        self.words, self.folder, self.integer, self.is_set, self.place = words, folder, integer, is_set, place
        self.has_patterns = has_patterns
        self.at = 0
        self.depth = 0

    def operator(self, ahead: int = 0) -> str:
        """The word at a position as an operator; empty past the end."""
        at = self.at + ahead
        return self.words[at][0] if at < len(self.words) else ""

    def remaining(self) -> int:
        return len(self.words) - self.at

    def either(self) -> bool:
        self.depth += 1
        if self.depth > 40:
            self.place.refuse("the condition is nested too deep; simplify it")
        result = self.both()
        while self.remaining() and self.operator() in ("||", "-o"):
            self.at += 1
            other = self.both()
            result = result or other
        self.depth -= 1
        return result

    def both(self) -> bool:
        result = self.single()
        while self.remaining() and self.operator() in ("&&", "-a"):
            self.at += 1
            other = self.single()
            result = result and other
        return result

    def single(self) -> bool:
        if not self.remaining():
            self.place.refuse("the condition is not complete; complete it")
        word = self.operator()
        if self.remaining() >= 3 and self.operator(1) in _BINARY:
            return self.binary()
        if word == "!" and self.remaining() > 1:
            self.depth += 1
            if self.depth > 40:
                self.place.refuse("the condition is nested too deep; simplify it")
            self.at += 1
            result = not self.single()
            self.depth -= 1
            return result
        if word == "(" and self.remaining() > 1:
            self.at += 1
            result = self.either()
            if self.operator() != ")":
                self.place.refuse("the parenthesis of the condition is not closed; close it")
            self.at += 1
            return result
        if re.fullmatch(r"-[a-zA-Z]", word) and self.remaining() > 1 and self.operator(1) not in ("&&", "||"):
            self.at += 2
            return self.unary(word, self.words[self.at - 1][0])
        self.at += 1
        return bool(word)

    def unary(self, operator: str, operand: str) -> bool:
        if operator in _FILE_TESTS:
            return _file_test(operator, operand, self.folder)
        if operator in ("-n", "-z"):
            return bool(operand) == (operator == "-n")
        if operator == "-v":
            return self.is_set(operand)
        if operator == "-t":
            return False
        return self.place.refuse(f"the test {operator} is not interpreted; use -n, -z, -e, -f or -d")

    def binary(self) -> bool:
        (text, _, _), (operator, _, _), (other, pattern, _) = self.words[self.at : self.at + 3]
        self.at += 3
        if operator in _NUMBER_TESTS:
            return bool(_NUMBER_TESTS[operator](self.number(text), self.number(other)))
        if operator == "=~":
            return _matches_regex(text, other, self.place)
        if operator in ("<", ">"):
            return text < other if operator == "<" else text > other
        is_same = fnmatch.fnmatchcase(text, pattern) if self.has_patterns else text == other
        return is_same == (operator != "!=")

    def number(self, text: str) -> int:
        if self.has_patterns:
            return self.integer(text)
        if not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text):
            self.place.refuse(f"{text[:80]!r} is not a whole number; check the variable")
        return int(text)


def holds(
    words: Sequence[tuple[str, str, bool]],
    folder: Path,
    integer: Callable[[str], int],
    is_set: Callable[[str], bool],
    place: Place,
    *,
    has_patterns: bool,
) -> bool:
    """Whether a condition is true.

    Args:
        words: for each word its string, its string as a pattern, and whether it is an operator of ``[[``.
        folder: working folder of the script.
        integer: evaluates an arithmetic expression.
        is_set: whether a variable is set, for ``-v``.
        place: line of the script, for messages.
        has_patterns: whether ``==`` compares with a pattern and numbers may be expressions, as in ``[[``.

    Raises:
        ScriptError: the condition is incomplete, or has an unknown test.
    """
    if not words:
        return False
    test = _Test(words, folder, integer, is_set, place, has_patterns=has_patterns)
    result = test.either()
    if test.remaining():
        place.refuse(f"{test.operator()[:80]!r} is unexpected in the condition; quote words with blanks")
    return result
