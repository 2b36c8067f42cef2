"""The syntax tree of a shell script: words, commands and lists of commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from ..._common.errors import UsageError


class ScriptError(UsageError):
    """A script cannot be interpreted."""


@dataclass(frozen=True)
class Place:
    """A line of a script, for messages."""

    script: str
    line: int

    def refuse(self, message: str) -> NoReturn:
        """Raise an error at this line.

        Raises:
            ScriptError: always.
        """
        raise ScriptError(f"{self.script}, line {self.line}: {message}")


@dataclass(frozen=True)
class Text:
    """Literal characters; unquoted ones are not split at blanks, because blanks end a word."""

    text: str
    is_quoted: bool = False


@dataclass(frozen=True)
class Parameter:
    """``${NAME[INDEX]OPERATOR OPERAND}``.

    Attributes:
        name: variable, number of an argument, or one of ``@*#?$!-``.
        index: subscript of an array: ``@``, ``*`` or an arithmetic expression; empty without one.
        operator: such as ``:-`` or ``%%``; ``length`` for ``${#NAME}``; empty without one.
        operands: the words after the operator; two for a replacement.
        is_quoted: whether it is within double quotes.
        place: line of the script.
    """

    name: str
    index: str
    operator: str
    operands: tuple[Word, ...]
    is_quoted: bool
    place: Place


@dataclass(frozen=True)
class Arithmetic:
    """``$((EXPRESSION))``; parameters in the expression are expanded first."""

    expression: Word
    is_quoted: bool
    place: Place


@dataclass(frozen=True)
class Substitution:
    """``$(COMMAND)`` or the same in backquotes: the text of the command, which is parsed when it is expanded."""

    text: str
    is_quoted: bool
    place: Place


@dataclass(frozen=True)
class Placeholder:
    """``<path to the file>``, which a document has in place of a value."""

    text: str
    place: Place


Part: TypeAlias = Text | Parameter | Arithmetic | Substitution | Placeholder
Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """``NAME=VALUE``, ``NAME[INDEX]=VALUE``, ``NAME+=VALUE`` or ``NAME=(WORD ...)``.

    Attributes:
        name: variable.
        index: subscript; empty without one.
        is_appended: whether the operator is ``+=``.
        value: a word, or a list of words for an array.
    """

    name: str
    index: str
    is_appended: bool
    value: Word | list[Word]


@dataclass
class Redirection:
    """A redirection of a command; ``target`` of a here-document is its body, which follows the line."""

    descriptor: str
    operator: str
    target: Word


@dataclass(frozen=True)
class Simple:
    """Assignments, words and redirections of one command."""

    place: Place
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    redirections: tuple[Redirection, ...]


@dataclass(frozen=True)
class Condition:
    """``[[ ... ]]``: words, and operators as plain strings."""

    place: Place
    tokens: tuple[Word | str, ...]


@dataclass(frozen=True)
class Evaluation:
    """``(( EXPRESSION ))`` as a command."""

    place: Place
    expression: Word


@dataclass(frozen=True)
class If:
    """``if``: pairs of condition and body; the condition of ``else`` is empty."""

    place: Place
    branches: tuple[tuple[Commands, Commands], ...]


@dataclass(frozen=True)
class Loop:
    """``while`` or ``until``."""

    place: Place
    is_until: bool
    condition: Commands
    body: Commands


@dataclass(frozen=True)
class For:
    """``for NAME in WORD ...``; without ``in``, the arguments of the script."""

    place: Place
    name: str
    words: tuple[Word, ...] | None
    body: Commands


@dataclass(frozen=True)
class Case:
    """``case WORD in PATTERN) ... ;; esac``."""

    place: Place
    word: Word
    branches: tuple[tuple[tuple[Word, ...], Commands], ...]


@dataclass(frozen=True)
class Group:
    """``{ ...; }``, or a subshell ``( ... )``, which keeps no variables."""

    place: Place
    is_subshell: bool
    body: Commands


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    place: Place
    name: str
    body: Command


Command: TypeAlias = Simple | Condition | Evaluation | If | Loop | For | Case | Group | Function


@dataclass(frozen=True)
class Pipeline:
    """Commands that are connected by ``|``; ``is_negated``: after ``!``."""

    place: Place
    commands: tuple[Command, ...]
    is_negated: bool


@dataclass(frozen=True)
class AndOr:
    """Pipelines that are connected by ``&&`` and ``||``; the operator of the first is empty."""

    pipelines: tuple[tuple[str, Pipeline], ...]
    is_background: bool = field(default=False)


Commands: TypeAlias = tuple[AndOr, ...]
