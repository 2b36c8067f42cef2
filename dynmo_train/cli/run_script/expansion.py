"""Expand the words in a shell script: parameters, arithmetic, known commands, and splitting at blanks.

A word becomes any number of strings: an unquoted ``$X`` splits at blanks, ``"${A[@]}"`` is one string for each element,
and an unquoted empty value disappears. File patterns are not expanded.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from .arithmetic import evaluate
from .braces import brace_words
from .syntax import Arithmetic, Parameter, Place, Placeholder, Substitution, Text, Word

MAX_VALUE = 1 << 20
_DEFAULTS = frozenset({":-", "-", ":=", "=", ":+", "+", ":?", "?"})
Value = str | list[str]
_GLOB_SPECIAL = re.compile(r"([*?\[\]])")


@dataclass
class Variables:
    """Variables and arguments of a script.

    Attributes:
        values: variable to string or array.
        arguments: ``$1``, ``$2``, ...
        name: ``$0``.
        status: exit status of the last command, ``$?``.
        is_unset_refused: whether an unset variable is an error (``set -u``).
        missing: names that were expanded without a value, for a note.
        settings: values of ``--set``; those of placeholders such as ``<model>`` among them.
    """

    values: dict[str, Value]
    arguments: list[str]
    name: str
    status: int = 0
    is_unset_refused: bool = False
    missing: dict[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Value | None:
        """The value of a parameter; None if it is unset."""
        if name.isdigit():
            number = int(name) if len(name) < 6 else MAX_VALUE
            if number == 0:
                return self.name
            return self.arguments[number - 1] if number <= len(self.arguments) else None
        special = {"#": str(len(self.arguments)), "?": str(self.status), "-": ""}
        return special.get(name, self.values.get(name))


class _Integers(MutableMapping[str, str]):
    """The variables as an arithmetic expression reads and writes them."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables

    def __getitem__(self, name: str) -> str:
        value = self.variables.get(name)
        if value is None:
            raise KeyError(name)
        return value if isinstance(value, str) else "".join(value[:1])

    def __setitem__(self, name: str, value: str) -> None:
        self.variables.values[name] = value

    def __delitem__(self, name: str) -> None:
        del self.variables.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables.values)

    def __len__(self) -> int:
        return len(self.variables.values)


class _Fields:
    """Strings that a word becomes, and the one that is not complete."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def end(self, *, if_true: bool) -> None:
        """Complete the current string, if there is one."""
        if if_true and self.current is not None:
            self.strings.append(self.current)
            self.current = None


class Expander:
    """Expands words with the variables of a script.

    Args:
        variables: variables and arguments.
        substitute: returns the output of a command; it refuses an unknown one.
        check_size: is called with the size of each expanded text.
    """

    def __init__(
        self, variables: Variables, substitute: Callable[[str, Place], str], check_size: Callable[[int, Place], None]
    ) -> None:
        self.variables, self.substitute, self.check_size = variables, substitute, check_size

    # One string

    def string(self, word: Word, place: Place) -> str:
        """Expand a word to one string, without splitting: the value of an assignment."""
        text = "".join(piece for piece, _ in self.pieces(word, place))
        return _with_home(text, word)

    def pattern(self, word: Word, place: Place) -> str:
        """Expand a word to a file pattern: quoted characters are literal."""
        return "".join(
            _GLOB_SPECIAL.sub(r"[\1]", piece) if is_quoted else piece for piece, is_quoted in self.pieces(word, place)
        )

    def integer(self, text: str, place: Place) -> int:
        """Evaluate an arithmetic expression."""
        return evaluate(text, _Integers(self.variables), place)

    def pieces(self, word: Word, place: Place) -> list[tuple[str, bool]]:
        """Expanded parts of a word, each with whether it is quoted; arrays are joined by blanks."""
        return [(" ".join(texts), is_quoted) for texts, is_quoted, _ in self.parts(word, place)]

    def placeholder(self, part: Placeholder) -> str:
        """The value that ``--set`` gives a placeholder of one word; all others are refused."""
        name = part.text.strip("<>")
        if name not in self.variables.settings:
            own = f", or --set {name}=VALUE for itself" if name.isidentifier() and name.isascii() else ""
            part.place.refuse(
                f"{part.text} stands for a value; write the value, or give --set NAME=VALUE for its variable{own}"
            )
        return self.variables.settings[name]

    # Several strings

    def fields(self, words: Sequence[Word], place: Place) -> list[str]:
        """Expand words to the strings that a command receives."""
        found: list[str] = []
        for word in words:
            found += self.split(word, place)
        return found

    def split(self, word: Word, place: Place) -> list[str]:
        """Expand one word to strings."""
        return [text for one in brace_words(word, place) for text in self.split_one(one, place)]

    def split_one(self, word: Word, place: Place) -> list[str]:
        """Expand one word without braces to strings."""
        found = _Fields()
        for texts, is_quoted, is_expanded in self.parts(word, place):
            if not is_expanded or is_quoted:
                # "$@" and "${A[@]}" have one string for each element.
                for number, text in enumerate(texts):
                    found.end(if_true=number > 0)
                    found.add(text)
            else:
                for number, text in enumerate(texts):
                    found.end(if_true=number > 0 or text[:1].isspace())
                    for at, piece in enumerate(text.split()):
                        found.end(if_true=at > 0)
                        found.add(piece)
                    found.end(if_true=text[-1:].isspace())
        found.end(if_true=True)
        strings = found.strings
        return [_with_home(strings[0], word)] if len(strings) == 1 else strings

    def parts(self, word: Word, place: Place) -> Iterator[tuple[list[str], bool, bool]]:
        """For each part of a word: its strings, whether it is quoted, and whether it is the result of an expansion."""
        for part in word:
            if isinstance(part, Text):
                yield [part.text], part.is_quoted, False
            elif isinstance(part, Placeholder):
                yield [self.placeholder(part)], False, False
            elif isinstance(part, Arithmetic):
                text = "".join(piece for piece, _ in self.pieces(part.expression, part.place))
                yield [str(self.integer(text, part.place))], part.is_quoted, True
            elif isinstance(part, Substitution):
                output = self.substitute(part.text, part.place).rstrip("\n")
                self.check_size(len(output), part.place)
                yield [output], part.is_quoted, True
            else:
                yield from self.parameter_parts(part)

    def parameter_parts(self, part: Parameter) -> Iterator[tuple[list[str], bool, bool]]:
        """The parts of a parameter expansion: its value, or the parts of the word after ``:-`` and similar."""
        if part.operator in _DEFAULTS:
            texts = self.default(part, self.lookup(part))
            if texts is None and not part.is_quoted:
                for inner, is_quoted, _ in self.parts(part.operands[0], part.place):
                    yield inner, is_quoted, True
                return
            texts = [self.string(part.operands[0], part.place)] if texts is None else texts
        else:
            texts = self.parameter(part)
        self.check_size(sum(map(len, texts)), part.place)
        yield texts, part.is_quoted, True

    # Parameters

    def parameter(self, part: Parameter) -> list[str]:
        """The strings of a parameter expansion."""
        value = self.lookup(part)
        if part.operator == "length":
            if part.index in ("@", "*") or part.name in ("@", "*"):
                return [str(len(value or []))]
            return [str(len("".join(value or "")))]
        if value is None:
            value = self.unset(part)
        texts = value if isinstance(value, list) else [value]
        if part.operator == ":" and ("@" in (part.name, part.index) or "*" in (part.name, part.index)):
            texts = self.elements(texts, part)
        elif part.operator:
            texts = [self.transform(text, part) for text in texts]
        is_joined = "*" in (part.name, part.index) and part.is_quoted
        return [" ".join(texts)] if is_joined else texts

    def lookup(self, part: Parameter) -> Value | None:
        """The value before the operator applies: a list for a whole array."""
        if part.name in ("@", "*"):
            return list(self.variables.arguments)
        if part.name in ("$", "!"):
            part.place.refuse(f"${part.name} is the number of a process, and none is started; remove it")
        value = self.variables.get(part.name)
        if part.index in ("@", "*"):
            return None if value is None else value if isinstance(value, list) else [value]
        if part.index:
            elements = value if isinstance(value, list) else [] if value is None else [value]
            position = self.integer(self.string(_index_word(part), part.place), part.place)
            return elements[position] if -len(elements) <= position < len(elements) else None
        return "".join(value[:1]) if isinstance(value, list) else value

    def unset(self, part: Parameter) -> Value:
        """The value of an unset variable: empty, or an error under ``set -u``."""
        if part.index in ("@", "*"):
            return []
        name = f"argument {part.name}" if part.name.isdigit() else part.name
        if self.variables.is_unset_refused:
            part.place.refuse(f"{name} has no value; {_remedy(part.name)}")
        self.variables.missing.setdefault(part.name, part.place.line)
        return ""

    def default(self, part: Parameter, value: Value | None) -> list[str] | None:
        """``:-`` and similar operators: the value, or None for the word after the operator.

        With a colon, an empty value is as an unset one.
        """
        joined = " ".join(value) if isinstance(value, list) else value
        is_missing = value is None or (part.operator.startswith(":") and not joined)
        operator = part.operator[-1]
        if operator == "+":
            return ([] if part.index else [""]) if is_missing else None
        if not is_missing and value is not None:
            return value if isinstance(value, list) else [value]
        if operator == "-":
            return None
        text = self.string(part.operands[0], part.place)
        if operator == "?":
            name = f"argument {part.name}" if part.name.isdigit() else part.name
            part.place.refuse(f"{name}: {text or 'has no value'}; {_remedy(part.name)}")
        if part.name.isidentifier():
            self.variables.values[part.name] = text
        return [text]

    def transform(self, text: str, part: Parameter) -> str:
        """``%``, ``#``, ``/``, substrings and case."""
        operator = part.operator
        if operator in (",,", ",", "^^", "^"):
            if self.string(part.operands[0], part.place):
                part.place.refuse(f"{operator} with a pattern is not interpreted; use ${{{part.name}{operator}}}")
            change = str.lower if "," in operator else str.upper
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        if operator == ":":
            return self.substring(text, part)
        if operator == "@":
            part.place.refuse(f"${{{part.name}@...}} is not interpreted; use ${{{part.name}}}")
        regex = re.compile(fnmatch.translate(self.pattern(part.operands[0], part.place)), re.DOTALL)
        if len(text) > 4096:
            part.place.refuse(f"the value of {part.name} has {len(text):,} characters; patterns apply to 4,096 at most")
        if operator in ("#", "##"):
            ends = range(len(text) + 1) if operator == "#" else range(len(text), -1, -1)
            return next((text[end:] for end in ends if regex.match(text[:end])), text)
        if operator in ("%", "%%"):
            starts = range(len(text), -1, -1) if operator == "%" else range(len(text) + 1)
            return next((text[:start] for start in starts if regex.match(text[start:])), text)
        return self.replaced(text, part)

    def replaced(self, text: str, part: Parameter) -> str:
        """``${NAME/PATTERN/TEXT}``; the pattern must be literal."""
        pieces = self.pieces(part.operands[0], part.place)
        if any(not is_quoted and _GLOB_SPECIAL.search(piece) for piece, is_quoted in pieces):
            part.place.refuse("a replacement of a file pattern is not interpreted; write the text to replace")
        old = "".join(piece for piece, _ in pieces)
        new = self.string(part.operands[1], part.place) if len(part.operands) > 1 else ""
        if not old:
            return text
        count = {"/": 1, "//": text.count(old), "/#": int(text.startswith(old)), "/%": int(text.endswith(old))}[
            part.operator
        ]
        self.check_size(len(text) + count * max(0, len(new) - len(old)), part.place)
        if part.operator == "/%":
            return text[: -len(old)] + new if count else text
        return text.replace(old, new, count)

    def elements(self, texts: list[str], part: Parameter) -> list[str]:
        """``${NAME[@]:OFFSET:LENGTH}``; ``${@:OFFSET:LENGTH}`` counts arguments from 1, and 0 is the script."""
        offset, _, length = self.string(part.operands[0], part.place).partition(":")
        texts = [self.variables.name, *texts] if part.name in ("@", "*") else texts
        start = self.integer(offset, part.place)
        start = len(texts) + start if start < 0 else start
        count = self.integer(length, part.place) if length else len(texts)
        if count < 0:
            part.place.refuse(f"the length {count} of a slice is negative; give the number of elements")
        return [] if start < 0 else texts[start : start + count]

    def substring(self, text: str, part: Parameter) -> str:
        """``${NAME:OFFSET}`` and ``${NAME:OFFSET:LENGTH}``."""
        offset, _, length = self.string(part.operands[0], part.place).partition(":")
        start = self.integer(offset, part.place)
        start = max(0, len(text) + start) if start < 0 else start
        if not length:
            return text[start:]
        count = self.integer(length, part.place)
        return text[start:count] if count < 0 else text[start : start + count]


def _remedy(name: str) -> str:
    return "give it after the script" if name.isdigit() else f"give --set {name}=VALUE"


def _index_word(part: Parameter) -> Word:
    name = part.index.removeprefix("$").strip("{}")
    if part.index.startswith("$") and name.isidentifier():
        return (Parameter(name, "", "", (), False, part.place),)
    return (Text(part.index),)


def _with_home(text: str, word: Word) -> str:
    """Replace a leading, unquoted ``~`` by the home folder."""
    first = word[0] if word else None
    if isinstance(first, Text) and not first.is_quoted and re.match(r"~(/|$)", first.text):
        return os.path.expanduser("~") + text[1:]
    return text
